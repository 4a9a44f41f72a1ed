// What a paged model is given and gives back.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

void bind_values(py::module_& module) {
  py::class_<GradientStatistics>(module, "GradientStatistics")
      .def_readonly("bytes", &GradientStatistics::bytes)
      .def_readonly("gradients", &GradientStatistics::gradients)
      .def_readonly("synchronous", &GradientStatistics::synchronous)
      .def_readonly("wait_seconds", &GradientStatistics::wait_seconds);
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<LeavingNorm>(module, "LeavingNorm", "Sums the squares of gradients as they come home.")
      .def("begin", &LeavingNorm::begin, py::arg("pool"), Released(),
           "From now on gradients are taken to be the step's last.")
      .def("forget", &LeavingNorm::forget, Released(), "What is known is void: gradients were changed unseen.")
      .def("end", &LeavingNorm::end, Released(), "Nothing is summed any more; for a step that failed.")
      .def("take", &LeavingNorm::take, py::arg("hosts"), Released(),
           "Ends; by host parameter the sum of its gradient's squares, or None where that is not known.")
      .def_property_readonly("taken", &LeavingNorm::taken);
  py::class_<MemorySample>(module, "MemorySample", "What the device held when a pass reached a block.")
      .def_readonly("kind", &MemorySample::kind)
      .def_readonly("block", &MemorySample::block)
      .def(
          "bytes",
          [](const MemorySample& sample, MemoryClass cls) {
            return sample.use.by_class[static_cast<std::size_t>(cls)];
          },
          py::arg("cls"));
  py::class_<WindowToken>(module, "WindowToken").def(py::init<>());
  py::class_<BlockUpdate>(module, "BlockUpdate", "The part of an optimizer step of one block, or several together.")
      .def(py::init<BlockList, TensorPlan, std::vector<at::Tensor>>(), py::arg("blocks"), py::arg("plan"),
           py::arg("tensors"));
  py::class_<SiteVisit>(module, "SiteVisit").def(py::init<>());
}

}  // namespace hydra
