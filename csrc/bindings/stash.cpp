#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/stash.h"

namespace py = pybind11;

namespace hydra {

void bind_stash(py::module_& module) {
  py::class_<StashStatistics>(module, "StashStatistics")
      .def_readonly("tensors", &StashStatistics::tensors)
      .def_readonly("kept", &StashStatistics::kept)
      .def_readonly("intervals", &StashStatistics::intervals)
      .def_readonly("saved_bytes", &StashStatistics::saved_bytes)
      .def_readonly("to_host_bytes", &StashStatistics::to_host_bytes)
      .def_readonly("to_device_bytes", &StashStatistics::to_device_bytes)
      .def_readonly("prefetched", &StashStatistics::prefetched)
      .def_readonly("stayed", &StashStatistics::stayed)
      .def_readonly("wait_seconds", &StashStatistics::wait_seconds)
      .def_readonly("backward_wait_seconds", &StashStatistics::backward_wait_seconds)
      .def_readonly("held_bytes", &StashStatistics::held_bytes)
      .def_readonly("peak_held_bytes", &StashStatistics::peak_held_bytes)
      .def_readonly("host_bytes", &StashStatistics::host_bytes);
  py::enum_<Treatment>(module, "Treatment").value("MOVE", Treatment::kMove).value("KEEP", Treatment::kKeep);
  module.def("begin_treatment", &begin_treatment, py::arg("treatment"),
             "What the calling thread saves is treated so, until the matching end_treatment().");
  module.def("end_treatment", &end_treatment);
  py::class_<SavedTensor, SavedTensorPtr>(module, "SavedTensor", "What a stash hands to autograd.");
  py::class_<Stash, std::shared_ptr<Stash>>(module, "Stash", "Saved tensors, off the device until backward.")
      .def(py::init<std::shared_ptr<DeviceBackend>, std::shared_ptr<HostArena>, at::Device, std::optional<Bytes>>(),
           py::kw_only(), py::arg("backend"), py::arg("arena"), py::arg("device"), py::arg("budget"))
      .def("pack", &Stash::pack, py::arg("tensor"))
      .def("unpack", &Stash::unpack, py::arg("saved"))
      .def("protect", &Stash::protect, py::arg("tensors"))
      .def("close", &Stash::close)
      .def("statistics", &Stash::statistics, "Once the transfers under way have ended.");
}

}  // namespace hydra
