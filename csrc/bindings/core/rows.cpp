#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "csrc/base/errors.h"
#include "csrc/bindings/bindings.h"
#include "csrc/io/row_file.h"
#include "csrc/optim/row_steps.h"
#include "csrc/pytorch/parameters/tensor_plan.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

template <class Number>
std::span<Number> numbers_of(const at::Tensor& tensor) {
  using Plain = std::remove_const_t<Number>;
  HYDRA_EXPECT(tensor.device().is_cpu() && tensor.is_contiguous() &&
                   tensor.scalar_type() == c10::CppTypeToScalarType<Plain>::value,
               StateError, "rows are numbered by another type of tensor");
  return {tensor.data_ptr<Plain>(), static_cast<std::size_t>(tensor.numel())};
}

using Step = std::variant<AdamStep, SgdStep>;

Rows rows_of(const Step& step, const std::vector<at::Tensor>& tensors, const at::Tensor& numbers,
             const at::Tensor& made) {
  const auto moment = [&](std::size_t index) {
    return index < tensors.size() ? OptionalTensor(tensors[index]) : std::nullopt;
  };
  const at::Tensor& weights = tensors.at(0);
  HYDRA_EXPECT(weights.is_contiguous() && weights.dim() > 0, StateError, "the weights of rows are not contiguous");
  TensorPlan plan;
  plan.add({step, weights, std::nullopt, weights, std::nullopt, moment(1), moment(2), 0});
  const std::int64_t width = weights.numel() / std::max<std::int64_t>(1, weights.size(0));
  return {plan.on_host().updates().front(), width, numbers_of<const std::int64_t>(numbers),
          numbers_of<std::int32_t>(made)};
}

/// The bytes of rows in the host's memory, one row behind the other.
std::byte* bytes_of(const RowFile& file, const at::Tensor& rows, const at::Tensor& memory) {
  HYDRA_EXPECT(memory.device().is_cpu() && memory.is_contiguous() &&
                   static_cast<Bytes>(memory.nbytes()) == rows.numel() * file.row_bytes(),
               StateError, "memory for rows of a file has another size or layout");
  return static_cast<std::byte*>(memory.data_ptr());
}

/// One call, so that no interrupt of Python's arrives between the parts of a step.
void write_rows(const std::vector<RowFile*>& files, const at::Tensor& rows, const std::vector<at::Tensor>& values,
                const at::Tensor& made, const at::Tensor& now) {
  HYDRA_EXPECT(files.size() == values.size() && now.numel() == rows.numel(), StateError,
               "rows of a step do not belong together");
  std::vector<const std::byte*> from;
  for (std::size_t index = 0; index < files.size(); ++index) {
    from.push_back(bytes_of(*files[index], rows, values[index]));
  }
  const auto numbers = numbers_of<const std::int64_t>(rows);
  const auto all = numbers_of<std::int32_t>(made);
  const auto its = numbers_of<const std::int32_t>(now);
  RowFile::write(files, numbers, from);
  for (std::size_t index = 0; index < numbers.size(); ++index) {
    all[static_cast<std::size_t>(numbers[index])] = its[index];
  }
}

void bind_row_file(py::module_& module) {
  module.attr("ROW_NOTES_BYTES") = RowFile::kNotesBytes;
  py::class_<RowFile> file(module, "RowFile",
                           "Rows of a tensor, all zeros at first, at home in a file without a name.");
  file.def(py::init([](std::string folder, std::int64_t rows, Bytes row_bytes,
                       const std::shared_ptr<FileOperations>& files) {
             return std::make_unique<RowFile>(std::move(folder), rows, row_bytes, files ? *files : system_files());
           }),
           py::arg("folder"), py::arg("rows"), py::arg("row_bytes"), py::arg("files") = nullptr, py::keep_alive<1, 5>(),
           Released())
      .def(
          "read",
          [](RowFile& file, const at::Tensor& rows, const at::Tensor& to) {
            file.read(numbers_of<const std::int64_t>(rows), bytes_of(file, rows, to));
          },
          py::arg("rows"), py::arg("to"), Released(), "Reads the rows with these numbers.")
      .def(
          "write",
          [](RowFile& file, const at::Tensor& rows, const at::Tensor& values) {
            file.write(numbers_of<const std::int64_t>(rows), bytes_of(file, rows, values));
          },
          py::arg("rows"), py::arg("values"), Released(), "Writes the rows with these numbers, each named once.")
      .def(
          "read_ahead",
          [](const RowFile& file, const at::Tensor& rows) { file.read_ahead(numbers_of<const std::int64_t>(rows)); },
          py::arg("rows"), Released(), "Has the system read the rows soon.")
      .def(
          "blank",
          [](const RowFile& file, const at::Tensor& rows) {
            at::Tensor blank = at::empty(rows.sizes(), at::TensorOptions().dtype(at::kBool).device(at::kCPU));
            const auto numbers = numbers_of<const std::int64_t>(rows);
            std::transform(numbers.begin(), numbers.end(), blank.data_ptr<bool>(),
                           [&](std::int64_t row) { return file.is_blank(row); });
            return blank;
          },
          py::arg("rows"), Released(), "Which of the rows have had no write, and so are zeros still.")
      .def_property_readonly("bytes_read", &RowFile::bytes_read)
      .def_property_readonly("bytes_written", &RowFile::bytes_written);
  module.def(
      "write_rows", &write_rows, py::arg("files"), py::arg("rows"), py::arg("values"), py::arg("made"), py::arg("now"),
      Released(),
      "Writes rows of several files, which are lost together if the disk fails, and the steps that they have made.");
}

}  // namespace

void bind_rows(py::module_& module) {
  bind_row_file(module);
  module.def(
      "catch_up_rows",
      [](const std::vector<at::Tensor>& tensors, const at::Tensor& rows, const at::Tensor& made, std::int64_t first,
         const std::vector<std::pair<Step, bool>>& missed, ThreadPool& pool) {
        std::vector<MissedStep> steps;
        for (const auto& [step, rests] : missed) {
          steps.push_back({step, rests});
        }
        if (!steps.empty()) {
          catch_up(rows_of(steps.back().step, tensors, rows, made), first, steps, pool);
        }
      },
      py::arg("tensors"), py::arg("rows"), py::arg("made"), py::arg("first"), py::arg("missed"), py::arg("pool"),
      Released(), "Makes the steps that rows of a table have missed, with a gradient of zero.");
  module.def(
      "step_rows",
      [](const std::vector<at::Tensor>& tensors, const at::Tensor& rows, const at::Tensor& made, const Step& step,
         const at::Tensor& gradient, std::int32_t number, ThreadPool& pool) {
        const Rows stepped = rows_of(step, tensors, rows, made);
        const std::span<const float> values = numbers_of<const float>(gradient);
        HYDRA_EXPECT(values.size() == stepped.numbers.size() * static_cast<std::size_t>(stepped.width), StateError,
                     "the gradient has other rows than those that are stepped");
        step_rows(stepped, step, values.data(), number, pool);
      },
      py::arg("tensors"), py::arg("rows"), py::arg("made"), py::arg("step"), py::arg("gradient"), py::arg("number"),
      py::arg("pool"), Released(), "Makes one step of rows of a table, and notes its number for them.");
}

}  // namespace hydra
