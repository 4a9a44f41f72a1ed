// Only in builds with CUDA: the codec on tensors of a GPU, on torch's current stream there. These wait for it; code
// that must not calls csrc/codec/cuda_codec.h.
#include "csrc/codec/cuda_codec.h"

#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/base/errors.h"
#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/memory/number_format.h"
#include "csrc/pytorch/stash/coder.h"
#include "csrc/pytorch/stash/saved_digest.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace py = pybind11;

namespace hydra {

namespace {

using codec::StreamHeader;

NumberFormat format_of(const at::Tensor& numbers, const at::Tensor& stream) {
  const std::optional<NumberFormat> format = number_format(numbers.scalar_type());
  TORCH_CHECK_VALUE(format && numbers.is_cuda() && (numbers.numel() == 0 || numbers.is_non_overlapping_and_dense()),
                    "numbers have to be dense float32, bfloat16 or float16 on a GPU");
  TORCH_CHECK_VALUE(stream.scalar_type() == at::kByte && stream.is_contiguous() && stream.device() == numbers.device(),
                    "a stream has to be contiguous uint8 where the numbers are");
  return *format;
}

cudaStream_t current_stream(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

at::Tensor device_bytes(const at::Tensor& like, Bytes bytes) {
  return like.new_empty({std::max<Bytes>(bytes, 1)}, like.options().dtype(at::kByte));
}

template <class Value>
Value read(const void* from, cudaStream_t on) {
  Value value;
  HYDRA_CUDA(cudaMemcpyAsync(&value, from, sizeof value, cudaMemcpyDeviceToHost, on));
  HYDRA_CUDA(cudaStreamSynchronize(on));
  return value;
}

Bytes compress(const at::Tensor& numbers, const at::Tensor& stream, double error_bound, bool keep_signs, bool fast) {
  const auto quantizer = codec::Quantizer::make(format_of(numbers, stream), error_bound, keep_signs);
  TORCH_CHECK_VALUE(stream.numel() >= codec::most_bytes(quantizer.format, numbers.numel()),
                    "the stream has no room for what it may come to");
  const auto choice = fast ? codec::Choice::kSigned : codec::Choice::kShortest;
  const at::Tensor workspace = device_bytes(numbers, codec::workspace_bytes(numbers.numel()));
  auto* const to = stream.mutable_data_ptr<std::uint8_t>();
  const py::gil_scoped_release released;
  const CudaDeviceGuard guard(numbers.device().index());
  const cudaStream_t on = current_stream(numbers);
  HYDRA_CUDA(codec::launch_compress(quantizer, choice, numbers.const_data_ptr(), numbers.numel(), to,
                                    workspace.mutable_data_ptr(), on));
  return codec::stream_bytes(read<StreamHeader>(to, on));
}

void decompress(const at::Tensor& stream, const at::Tensor& numbers) {
  const NumberFormat format = format_of(numbers, stream);
  const at::Tensor workspace = device_bytes(numbers, codec::workspace_bytes(numbers.numel()));
  const at::Tensor flag = device_bytes(numbers, sizeof(std::uint32_t));
  auto* const damaged = static_cast<std::uint32_t*>(flag.mutable_data_ptr());
  const auto* const from = stream.const_data_ptr<std::uint8_t>();
  const py::gil_scoped_release released;
  const CudaDeviceGuard guard(numbers.device().index());
  const cudaStream_t on = current_stream(numbers);
  HYDRA_EXPECT(stream.numel() >= static_cast<Bytes>(sizeof(StreamHeader)), DamagedStream, "less than a header's bytes");
  const auto begin = read<std::array<std::uint8_t, sizeof(StreamHeader)>>(from, on);
  const StreamHeader header = codec::header_of(begin, stream.numel());
  TORCH_CHECK_VALUE(header.count == numbers.numel() && header.format == format, "the stream is of ", header.count,
                    " numbers, or of another type");
  HYDRA_CUDA(codec::launch_decompress(header, from, stream.numel(), numbers.mutable_data_ptr(),
                                      workspace.mutable_data_ptr(), damaged, on));
  HYDRA_EXPECT(read<std::uint32_t>(damaged, on) == 0, DamagedStream,
               "not a whole stream of compressed numbers: a part is not as long as it says");
}

}  // namespace

void bind_cuda_codec(py::module_& module) {
  py::module_ part = module.attr("codec");
  part.def("compress_on_cuda", &compress, py::arg("numbers"), py::arg("stream"), py::kw_only(), py::arg("error_bound"),
           py::arg("keep_signs"), py::arg("fast"), "Returns how many bytes of the stream are used.");
  part.def("decompress_on_cuda", &decompress, py::arg("stream"), py::arg("numbers"));
  set_cuda_coders(cuda_coders());
  set_add_by_place(add_by_place_on_cuda());
}

}  // namespace hydra
