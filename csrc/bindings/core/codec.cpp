// Bindings of the codec for torch's tensors; hydra_ext.codec is the public interface. Numbers are read in the order of
// their addresses.
#include "csrc/codec/codec.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/codec/kernels/kernels.h"
#include "csrc/pytorch/memory/number_format.h"

namespace py = pybind11;

namespace hydra {

namespace {

using codec::StreamHeader;
using OptionalInstructions = std::optional<InstructionSet>;

InstructionSet chosen(OptionalInstructions instructions) {
  return instructions.value_or(codec::supported_instruction_sets().back());
}

NumberFormat format_of(const at::Tensor& numbers) {
  const std::optional<NumberFormat> format = number_format(numbers.scalar_type());
  TORCH_CHECK_VALUE(format && (numbers.numel() == 0 || numbers.is_non_overlapping_and_dense()),
                    "`numbers` must be a dense tensor of float32, bfloat16 or float16");
  return *format;
}

/// Reads the header of a stream on the CPU or a GPU.
StreamHeader header(const at::Tensor& stream) {
  const at::Tensor begin = stream.slice(0, 0, sizeof(StreamHeader)).cpu();
  return codec::header_of({begin.const_data_ptr<std::uint8_t>(), static_cast<std::size_t>(begin.numel())},
                          stream.numel());
}

std::span<std::uint8_t> bytes_of(const at::Tensor& stream) {
  TORCH_CHECK_VALUE(stream.scalar_type() == at::kByte && stream.is_cpu() && stream.is_contiguous(),
                    "`stream` must be a contiguous uint8 tensor on the CPU");
  return {stream.mutable_data_ptr<std::uint8_t>(), static_cast<std::size_t>(stream.numel())};
}

Bytes compress(const at::Tensor& numbers, const at::Tensor& stream, double error_bound, bool keep_signs, bool fast,
               ThreadPool& pool, OptionalInstructions instructions) {
  const auto quantizer = codec::Quantizer::make(format_of(numbers), error_bound, keep_signs);
  const std::span<std::uint8_t> to = bytes_of(stream);
  TORCH_CHECK_VALUE(numbers.is_cpu(), "`numbers` must be on the CPU");
  TORCH_CHECK_VALUE(static_cast<Bytes>(to.size()) >= codec::most_bytes(quantizer.format, numbers.numel()),
                    "`stream` has ", to.size(), " bytes, fewer than most_bytes() of the numbers");
  const auto choice = fast ? codec::Choice::kSigned : codec::Choice::kShortest;
  const void* from = numbers.const_data_ptr();
  const py::gil_scoped_release released;
  return codec::compress(quantizer, choice, from, numbers.numel(), to.data(), pool, chosen(instructions));
}

void decompress(const at::Tensor& stream, const at::Tensor& numbers, ThreadPool& pool,
                OptionalInstructions instructions) {
  const std::span<const std::uint8_t> from = bytes_of(stream);
  const StreamHeader header = codec::header_of(from);
  TORCH_CHECK_VALUE(numbers.is_cpu() && header.count == numbers.numel() && header.format == format_of(numbers),
                    "the stream has ", header.count,
                    " numbers: `numbers` must be a CPU tensor of as many, of its type");
  void* to = numbers.mutable_data_ptr();
  const py::gil_scoped_release released;
  codec::decompress(from, to, pool, chosen(instructions));
}

}  // namespace

void bind_codec(py::module_& module) {
  py::module_ part = module.def_submodule(
      "codec", "Compresses numbers to a stream of bytes within an error bound, and restores them.");
  py::class_<StreamHeader>(part, "StreamHeader")
      .def_readonly("count", &StreamHeader::count)
      .def_readonly("error_bound", &StreamHeader::bound)
      .def_readonly("step", &StreamHeader::step)
      .def_property_readonly("keep_signs", [](const StreamHeader& header) { return header.keeps_signs != 0; })
      .def_property_readonly("dtype", [](const StreamHeader& header) { return scalar_type(header.format); });
  part.def("supported_instruction_sets", &codec::supported_instruction_sets,
           "The instruction sets that this machine can run, from slow to fast.");
  part.def(
      "most_bytes", [](const at::Tensor& numbers) { return codec::most_bytes(format_of(numbers), numbers.numel()); },
      py::arg("numbers"), "The bytes that a stream must have room for, to compress the numbers to it.");
  part.def("compress", &compress, py::arg("numbers"), py::arg("stream"), py::kw_only(), py::arg("error_bound"),
           py::arg("keep_signs"), py::arg("fast"), py::arg("pool"), py::arg("instructions") = std::nullopt,
           "Returns the number of bytes used.");
  part.def("header", &header, py::arg("stream"));
  part.def("decompress", &decompress, py::arg("stream"), py::arg("numbers"), py::kw_only(), py::arg("pool"),
           py::arg("instructions") = std::nullopt);
}

}  // namespace hydra
