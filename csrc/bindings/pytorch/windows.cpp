// Parts of a paged model that passes meet: its windows, arrivals at blocks, stays of rounds.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

void bind_windows(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> gil_released;
  py::class_<WindowGate>(module, "WindowGate", "Which threads are inside, and what modules show meanwhile.")
      .def(
          "show",
          [](WindowGate& gate, py::object host, py::object face) { gate.swap().add(std::move(host), std::move(face)); },
          py::arg("host"), py::arg("face"), "The face stands in the host's place while a window is open.")
      .def(
          "watch",
          [](WindowGate& gate, py::dict dictionary, std::string name) {
            gate.swap().watch(std::move(dictionary), std::move(name));
          },
          py::arg("dictionary"), py::arg("name"))
      .def(
          "wait_for_others",
          [](WindowGate& gate, std::int64_t milliseconds) {
            return gate.swap().wait_for_others(std::chrono::milliseconds(milliseconds));
          },
          py::arg("milliseconds"), "False when other threads are still inside after that time.")
      .def_property_readonly("open", &WindowGate::open)
      .def_property_readonly(
          "in_backward", [](WindowGate& gate) { return gate.swap().in_backward(); },
          "Whether some thread is inside a backward.")
      .def_property_readonly("opens", [](WindowGate& gate) { return gate.swap().opens(); })
      .def_property_readonly("foreign_entries", [](WindowGate& gate) { return gate.swap().foreign_entries(); });
  py::class_<ModelWindow>(module, "ModelWindow", "Windows, and visits of sites.")
      .def("enter", &ModelWindow::enter, py::arg("token"), py::arg("kind"))
      .def("exit", &ModelWindow::exit, py::arg("token"), py::kw_only(), py::arg("failed"))
      .def("returns", py::overload_cast<WindowToken&, const std::vector<at::Tensor>&>(&ModelWindow::returns),
           py::arg("token"), py::arg("outputs"))
      .def("begin_visit", &ModelWindow::begin_visit, py::arg("visit"), py::arg("blocks"), py::arg("kind"))
      .def("returns", py::overload_cast<SiteVisit&, const std::vector<at::Tensor>&>(&ModelWindow::returns),
           py::arg("visit"), py::arg("outputs"))
      .def("end_visit", &ModelWindow::end_visit, py::arg("visit"), py::kw_only(), py::arg("failed"));
  // A context manager made of C: no interrupt can come between entering and the `with` that will leave.
  py::class_<Windows>(module, "Windows", "The windows of several models, entered and left together.")
      .def(py::init<std::vector<std::shared_ptr<PagedModel>>, PassKind>(), py::arg("models"), py::arg("kind"))
      .def("__enter__", &Windows::enter)
      .def("__exit__", [](Windows& windows, const py::object& type, const py::object&, const py::object&) {
        windows.exit(!type.is_none());
      });
  py::class_<MemoryTimeline>(module, "MemoryTimeline", "What the device held when passes reached blocks.")
      .def("advise", &MemoryTimeline::advise, py::arg("remedies"),
           "What helps beside a larger budget, for messages. Called before the first pass.")
      .def("record", &MemoryTimeline::record, py::arg("samples"))
      .def("samples", &MemoryTimeline::samples);
  py::class_<Arrivals>(module, "Arrivals", "Passes arrive at blocks, and leave them.")
      .def("set_version", &Arrivals::set_version, py::arg("version"))
      .def_property_readonly("timeline", &Arrivals::timeline)
      .def_property_readonly("dropped_copies", &Arrivals::dropped_copies);
  py::class_<RoundStay>(module, "RoundStay", "Blocks that a round stays in.")
      .def("stay_in", &RoundStay::stay_in, gil_released, py::arg("blocks"), py::arg("kind"))
      .def("drop_copies", &RoundStay::drop_copies);
}

}  // namespace hydra
