// Bindings of the schedule's verifier and simulator: whether a schedule can run, and how long it takes.
#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/schedule/simulator.h"
#include "csrc/schedule/verifier.h"

namespace py = pybind11;

namespace hydra {

using namespace schedule;  // NOLINT: the words of one folder

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

Limits limits_of(std::optional<int> in_flight, std::optional<int> versions, std::optional<int> gradients) {
  return {in_flight.value_or(kUnlimited), versions.value_or(kUnlimited), gradients.value_or(kUnlimited)};
}

void bind_verifier(py::module_& module, py::class_<Schedule>& schedule_class) {
  py::class_<Peaks>(module, "SchedulePeaks", "The largest counts at any one time.")
      .def_readonly("in_flight", &Peaks::in_flight,
                    "Microbatches between forward and backward, whose stashes are alive.")
      .def_readonly("versions", &Peaks::versions, "Versions of the weights that are newest, in use, or being written.")
      .def_readonly("gradients", &Peaks::gradients, "Batches between their first backward and their update.")
      .def("__repr__", [](const Peaks& peaks) {
        return "SchedulePeaks(in_flight=" + std::to_string(peaks.in_flight) +
               ", versions=" + std::to_string(peaks.versions) + ", gradients=" + std::to_string(peaks.gradients) + ")";
      });
  py::class_<Verification>(module, "Verification", "The needs of a schedule that can run.")
      .def_readonly("stages", &Verification::stages, "The peaks of each stage.")
      .def_readonly("ranks", &Verification::ranks, "The peaks of each rank, over all its stages.")
      .def_readonly("batches", &Verification::batches, "The number of batches that the verifier ran through.")
      .def_readonly("rendezvous", &Verification::rendezvous,
                    "Whether the schedule also runs if each send blocks until its receive is posted.");
  schedule_class.def(
      "verify",
      [](const Schedule& schedule, std::optional<int> in_flight, std::optional<int> versions,
         std::optional<int> gradients) { return verify(schedule, limits_of(in_flight, versions, gradients)); },
      py::kw_only(), py::arg("in_flight") = std::nullopt, py::arg("versions") = std::nullopt,
      py::arg("gradients") = std::nullopt, Released());
  schedule_class.def(
      "verify_actions",
      [](const Schedule& schedule, const std::vector<Actions>& ranks, std::vector<int> microbatches) {
        return verify(schedule, ranks, std::move(microbatches));
      },
      py::arg("ranks"), py::kw_only(), py::arg("microbatches"), Released());
}

}  // namespace

void bind_simulation(py::module_& module, py::class_<Schedule>& schedule_class) {
  bind_verifier(module, schedule_class);
  py::class_<TimedAction>(module, "TimedAction",
                          "An action with its times, in seconds from the start of the first action.")
      .def_readonly("action", &TimedAction::action)
      .def_readonly("rank", &TimedAction::rank)
      .def_readonly("start", &TimedAction::start)
      .def_readonly("end", &TimedAction::end);
  py::class_<Timeline>(module, "Timeline", "The times of a schedule's actions.")
      .def_readonly("actions", &Timeline::actions, "All actions, rank by rank, in the order of each rank.")
      .def_readonly("makespan", &Timeline::makespan)
      .def_readonly("period", &Timeline::period)
      .def_readonly("busy", &Timeline::busy)
      .def_readonly("bubbles", &Timeline::bubbles);
  schedule_class.def(
      "simulate",
      [](const Schedule& schedule, int batches, std::vector<double> forward, std::vector<double> backward,
         std::vector<double> update, std::vector<double> reduce, std::vector<double> transfer,
         std::vector<double> latency, bool overlap, bool global_norm) {
        return simulate(schedule,
                        {std::move(forward), std::move(backward), std::move(update), std::move(reduce),
                         std::move(transfer), std::move(latency), overlap, global_norm},
                        batches);
      },
      py::arg("batches"), py::kw_only(), py::arg("forward"), py::arg("backward"), py::arg("update"), py::arg("reduce"),
      py::arg("transfer"), py::arg("latency"), py::arg("overlap"), py::arg("global_norm"), Released());
}

}  // namespace hydra
