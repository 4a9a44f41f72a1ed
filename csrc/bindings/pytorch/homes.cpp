// Parts of a paged model: where its blocks are at home, and their moves.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

namespace {

void bind_home_statistics(py::module_& module) {
  py::class_<HomeStatistics>(module, "HomeStatistics")
      .def_readonly("settled", &HomeStatistics::settled)
      .def_readonly("returned", &HomeStatistics::returned)
      .def_readonly("moved_bytes", &HomeStatistics::moved_bytes);
  module.attr("DISK_ALIGNMENT") = kDiskAlignment;
  module.attr("DISK_LEAST_BYTES") = kLeastDiskBytes;
  module.attr("DISK_WORKING_SETS") = DiskHomes::kWorkingSets;
  py::class_<DiskStatistics>(module, "DiskStatistics")
      .def_property_readonly("state_bytes", [](const DiskStatistics& all) { return all.at_home_bytes[0]; })
      .def_property_readonly("weight_bytes", [](const DiskStatistics& all) { return all.at_home_bytes[1]; })
      .def_property_readonly("gradient_bytes", [](const DiskStatistics& all) { return all.at_home_bytes[2]; })
      .def_readonly("working_bytes", &DiskStatistics::working_bytes)
      .def_readonly("read_bytes", &DiskStatistics::read_bytes)
      .def_readonly("written_bytes", &DiskStatistics::written_bytes)
      .def_readonly("spared_bytes", &DiskStatistics::spared_bytes)
      .def_readonly("wait_seconds", &DiskStatistics::wait_seconds);
}

std::optional<at::Tensor> read_from_disk(HomeMoves& moves, const at::Tensor& tensor) {
  at::Tensor copy = moves.read_from_disk(tensor);
  return copy.defined() ? std::optional<at::Tensor>(std::move(copy)) : std::nullopt;
}

}  // namespace

void bind_homes(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> gil_released;
  bind_home_statistics(module);
  py::class_<ModelDisk>(module, "ModelDisk", "The disk as a home, if there is one.")
      .def("open", &ModelDisk::open, py::arg("folder"), py::arg("sizes"), py::arg("files") = nullptr, gil_released)
      .def("make", &ModelDisk::make, py::arg("block"), py::arg("like"), py::arg("dtype"), py::kw_only(),
           py::arg("copies"), gil_released, "A tensor of the optimizer's state that is at home there.")
      .def_property_readonly("fills", &ModelDisk::fills)
      .def_property_readonly("statistics", released(&ModelDisk::statistics));
  py::class_<BlockHomes>(module, "BlockHomes", "Where blocks are at home, besides the host.")
      .def_property_readonly("disk", &BlockHomes::disk)
      .def_property_readonly("on_device", released([](BlockHomes& homes) { return homes.device().blocks(); }),
                             "Blocks whose home is the device.")
      .def_property_readonly("statistics", released([](BlockHomes& homes) { return homes.device().statistics(); }),
                             "Of the device.");
  py::class_<HomeMoves>(module, "HomeMoves", "Moves of blocks between their homes.")
      .def("settle_on_device", &HomeMoves::settle_on_device, py::arg("block"), py::arg("state"), gil_released,
           "The device becomes the block's home, if it can.")
      .def("settle_state_on_disk", &HomeMoves::settle_state_on_disk, py::arg("block"), py::arg("state"), gil_released,
           "The disk becomes the home of the block's optimizer state.")
      .def("settle_weights_on_disk", &HomeMoves::settle_weights_on_disk, py::arg("block"), gil_released,
           "The disk becomes the home of the block's weights, if it can.")
      .def("bring_home", py::overload_cast<std::int32_t>(&HomeMoves::bring_home), py::arg("block"), gil_released)
      .def("bring_all_home", &HomeMoves::bring_all_home, py::kw_only(), py::arg("from_disk"), gil_released)
      .def("update", &HomeMoves::update, py::arg("update"), py::arg("pool"), py::arg("scale") = 1.0F, gil_released,
           "Runs a block's part of an optimizer step now, where its home is.")
      .def("read_from_disk", &read_from_disk, py::arg("tensor"), gil_released,
           "A copy of what is on the disk; None if it is not.");
  module.def("scale_gradient", &scale_gradient, py::arg("gradient"), py::arg("factor"), gil_released,
             "In place, wherever the gradient's home is.");
}

}  // namespace hydra
