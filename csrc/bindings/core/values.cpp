// Bindings of the values that a paged model takes and returns.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

void bind_values(py::module_& module) {
  py::class_<GradientStatistics>(module, "GradientStatistics")
      .def_readonly("bytes", &GradientStatistics::bytes)
      .def_readonly("leaving", &GradientStatistics::leaving)
      .def_readonly("gradients", &GradientStatistics::gradients)
      .def_readonly("synchronous", &GradientStatistics::synchronous)
      .def_readonly("wait_seconds", &GradientStatistics::wait_seconds);
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<LeavingNorm>(module, "LeavingNorm", "Sums the squares of gradients as they reach the host.")
      .def("begin", &LeavingNorm::begin, py::arg("pool"), Released(),
           "Starts summing: gradients that arrive from now on count as the step's last.")
      .def("forget", &LeavingNorm::forget, Released(),
           "Discards all sums, after a change to gradients that the engine did not see.")
      .def("end", &LeavingNorm::end, Released(), "Stops summing, after a failed step.")
      .def("take", &LeavingNorm::take, py::arg("hosts"), Released(),
           "Stops summing. Returns each host parameter's sum of squared gradients, or None where it is unknown.")
      .def_property_readonly("taken", &LeavingNorm::taken);
  py::class_<MemorySample>(module, "MemorySample", "The bytes on the device when a pass reached a block.")
      .def_readonly("kind", &MemorySample::kind)
      .def_readonly("block", &MemorySample::block)
      .def(
          "bytes",
          [](const MemorySample& sample, MemoryClass cls) {
            return sample.use.by_class[static_cast<std::size_t>(cls)];
          },
          py::arg("cls"));
  py::class_<WindowToken>(module, "WindowToken").def(py::init<>());
  py::class_<BlockUpdate>(module, "BlockUpdate",
                          "The part of an optimizer step that updates one block, or several together.")
      .def(py::init<BlockList, TensorPlan, std::vector<at::Tensor>>(), py::arg("blocks"), py::arg("plan"),
           py::arg("tensors"));
  py::class_<SiteVisit>(module, "SiteVisit").def(py::init<>());
}

}  // namespace hydra
