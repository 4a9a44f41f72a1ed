#include "csrc/bindings/bindings.h"
#include "csrc/memory/host_arena.h"
#include "csrc/memory/ledger.h"
#include "csrc/memory/tracked_resource.h"

namespace py = pybind11;

namespace hydra {

void bind_memory(py::module_& module) {
  py::enum_<MemoryClass>(module, "MemoryClass")
      .value("WEIGHTS", MemoryClass::kWeights)
      .value("GRADIENTS", MemoryClass::kGradients)
      .value("ACTIVATIONS", MemoryClass::kActivations)
      .value("BUFFERS", MemoryClass::kBuffers)
      .value("OPTIMIZER", MemoryClass::kOptimizer);
  py::class_<Ledger>(module, "Ledger", "Bytes in use by class, against one limit.")
      .def_property_readonly("limit", &Ledger::limit)
      .def("set_limit", &Ledger::set_limit, py::arg("limit"))
      .def_property_readonly("in_use", py::overload_cast<>(&Ledger::in_use, py::const_))
      .def("in_use_by", py::overload_cast<MemoryClass>(&Ledger::in_use, py::const_), py::arg("cls"))
      .def_property_readonly("peak", &Ledger::peak)
      .def(
          "peak_by",
          [](const Ledger& ledger, MemoryClass cls) {
            return ledger.at_peak().by_class[static_cast<std::size_t>(cls)];
          },
          py::arg("cls"), "Bytes of one class at the moment of the highest total.")
      .def_property_readonly(
          "peak_workspace", [](const Ledger& ledger) { return ledger.at_peak().workspace; },
          "Activations at the highest total that were allocated since the pass reached the block in use.")
      .def("try_charge", &Ledger::try_charge, py::arg("cls"), py::arg("bytes"))
      .def("discharge", &Ledger::discharge, py::arg("cls"), py::arg("bytes"))
      .def("reset_peak", &Ledger::reset_peak)
      .def("take_peak", &Ledger::take_peak, "The highest total since the last call.");
  py::class_<HostArena, std::shared_ptr<HostArena>>(module, "HostArena")
      .def(py::init([] { return std::make_shared<HostArena>(); }))
      .def_property_readonly("mapped_bytes", &HostArena::mapped_bytes)
      .def_property_readonly("pinned_bytes", &HostArena::pinned_bytes)
      .def_property_readonly("pageable_bytes", &HostArena::pageable_bytes);
}

}  // namespace hydra
