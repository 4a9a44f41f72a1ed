#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Released = py::call_guard<py::gil_scoped_release>;
using ModelClass = py::class_<PagedModel, std::shared_ptr<PagedModel>>;

}  // namespace

void bind_homes(py::module_& module) {
  py::class_<HomeStatistics>(module, "HomeStatistics")
      .def_readonly("settled", &HomeStatistics::settled)
      .def_readonly("returned", &HomeStatistics::returned)
      .def_readonly("moved_bytes", &HomeStatistics::moved_bytes);
  module.attr("DISK_ALIGNMENT") = kDiskAlignment;
  module.attr("DISK_LEAST_BYTES") = kLeastDiskBytes;
  module.attr("DISK_WORKING_SETS") = DiskHomes::kWorkingSets;
  py::class_<FileOperations, std::shared_ptr<FileOperations>>(module, "FileOperations");
  py::class_<DiskStatistics>(module, "DiskStatistics")
      .def_property_readonly("state_bytes", [](const DiskStatistics& all) { return all.at_home_bytes[0]; })
      .def_property_readonly("weight_bytes", [](const DiskStatistics& all) { return all.at_home_bytes[1]; })
      .def_property_readonly("gradient_bytes", [](const DiskStatistics& all) { return all.at_home_bytes[2]; })
      .def_readonly("working_bytes", &DiskStatistics::working_bytes)
      .def_readonly("read_bytes", &DiskStatistics::read_bytes)
      .def_readonly("written_bytes", &DiskStatistics::written_bytes)
      .def_readonly("spared_bytes", &DiskStatistics::spared_bytes)
      .def_readonly("wait_seconds", &DiskStatistics::wait_seconds);
  auto model_class = py::reinterpret_borrow<ModelClass>(module.attr("PagedModel"));
  model_class
      .def("settle", &PagedModel::settle, py::arg("block"), py::arg("state"), Released(),
           "The device becomes the block's home, if it can.")
      .def("bring_home", py::overload_cast<std::int32_t>(&PagedModel::bring_home), py::arg("block"), Released())
      .def(
          "bring_home",
          [](PagedModel& model, bool disk) { disk ? model.bring_home() : model.bring_home_from_device(); },
          py::kw_only(), py::arg("disk") = true, Released(), "All of it; what is on the `disk` may stay there.")
      .def("update_at_home", &PagedModel::update_at_home, py::arg("update"), py::arg("pool"), py::arg("scale") = 1.0F,
           Released())
      .def_property_readonly("settled_blocks",
                             py::cpp_function([](PagedModel& model) { return model.homes().blocks(); }, Released()))
      .def_property_readonly(
          "home_statistics",
          py::cpp_function([](PagedModel& model) { return model.homes().statistics(); }, Released()));
  model_class
      .def("open_disk", &PagedModel::open_disk, py::arg("folder"), py::arg("sizes"), py::arg("files") = nullptr,
           Released())
      .def("settle_on_disk", &PagedModel::settle_on_disk, py::arg("block"), py::arg("state"), Released(),
           "The disk becomes the home of the block's optimizer state.")
      .def("settle_weights_on_disk", &PagedModel::settle_weights_on_disk, py::arg("block"), Released(),
           "The disk becomes the home of the block's weights, if it can.")
      .def_property_readonly("disk_fills", &PagedModel::disk_fills)
      .def("send_gradients_to_disk", &PagedModel::send_gradients_to_disk, py::arg("block"), py::arg("backlog"),
           Released())
      .def("make_on_disk", &PagedModel::make_on_disk, py::arg("block"), py::arg("like"), py::arg("dtype"),
           py::kw_only(), py::arg("copies"), Released())
      .def(
          "read_from_disk",
          [](PagedModel& model, const at::Tensor& tensor) -> std::optional<at::Tensor> {
            at::Tensor copy = model.read_from_disk(tensor);
            return copy.defined() ? std::optional<at::Tensor>(std::move(copy)) : std::nullopt;
          },
          py::arg("tensor"), Released(), "A copy of what is on the disk; None if it is not.")
      .def_property_readonly("disk_statistics", py::cpp_function(&PagedModel::disk_statistics, Released()));
  module.def("scale_gradient", &scale_gradient, py::arg("gradient"), py::arg("factor"), Released(),
             "In place, wherever the gradient's home is.");
}

}  // namespace hydra
