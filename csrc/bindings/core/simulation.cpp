// Bindings of the schedule's verifier and simulator: whether a schedule can run, and how long it takes. And of the
// record of a simulated step: what compute and the lanes do when.
#include <pybind11/stl.h>

#include <limits>
#include <utility>
#include <vector>

#include "csrc/bindings/bindings.h"
#include "csrc/plan/activation_plan.h"
#include "csrc/schedule/simulator.h"
#include "csrc/schedule/verifier.h"

namespace py = pybind11;

namespace hydra {

using namespace schedule;  // NOLINT: the words of one folder

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

constexpr double kAnySpeed = std::numeric_limits<double>::infinity();

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

ActivationProblem step_problem(std::vector<std::vector<ActivationSegment>> cuts, int microbatches,
                               const ActivationMachine& machine) {
  ActivationProblem problem;
  problem.cuts = std::move(cuts);
  problem.microbatches = microbatches;
  problem.machine = machine;
  return problem;
}

StepRecord record_step(std::vector<ActivationSegment> segments, std::vector<ActivationOption> options, int round_size,
                       Bytes stash_bytes, int microbatches, Bytes budget, double to_device, double to_host,
                       double update_seconds, Bytes host_bytes, double disk) {
  const ActivationProblem problem =
      step_problem({std::move(segments)}, microbatches, {budget, to_device, to_host, host_bytes, update_seconds, disk});
  StepRecord record;
  judge_activations(problem, 0, {std::move(options), round_size, stash_bytes}, &record);
  return record;
}

ActivationPlan judge_plan(std::vector<std::vector<ActivationSegment>> cuts, const ActivationPlan& plan,
                          int microbatches, Bytes budget, double to_device, double to_host, double update_seconds,
                          Bytes host_bytes, double disk) {
  const ActivationProblem problem =
      step_problem(std::move(cuts), microbatches, {budget, to_device, to_host, host_bytes, update_seconds, disk});
  return judge_activations(problem, plan.cut, plan.treatment);
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

void bind_step_record(py::module_& module) {
  py::enum_<StepWorkKind>(module, "StepWorkKind")
      .value("FORWARD", StepWorkKind::kForward)
      .value("RECOMPUTE", StepWorkKind::kRecompute)
      .value("BACKWARD", StepWorkKind::kBackward)
      .value("UPDATE", StepWorkKind::kUpdate)
      .value("BRING_WEIGHTS", StepWorkKind::kBringWeights)
      .value("BRING_STASH", StepWorkKind::kBringStash)
      .value("SEND_STASH", StepWorkKind::kSendStash)
      .value("SEND_GRADIENTS", StepWorkKind::kSendGradients);
  py::class_<StepWork>(module, "StepWork", "What compute or a lane does, in seconds since the step began.")
      .def_readonly("kind", &StepWork::kind)
      .def_readonly("segment", &StepWork::segment, "Its number; none for an update.")
      .def_readonly("begin", &StepWork::begin)
      .def_readonly("end", &StepWork::end)
      .def_readonly("bytes", &StepWork::bytes, "That are moved.");
  py::class_<StepRecord>(module, "StepRecord")
      .def_readonly("work", &StepRecord::work, "What each lane does is in the order of time.")
      .def_readonly("stays", &StepRecord::stays,
                    "When each round begins in each segment: forward, then backward from the last segment on.");
  module.def("record_step", &record_step, py::arg("segments"), py::kw_only(), py::arg("options"), py::arg("round_size"),
             py::arg("stash_bytes"), py::arg("microbatches"), py::arg("budget"),
             py::arg_v("to_device", kAnySpeed, "float('inf')"), py::arg_v("to_host", kAnySpeed, "float('inf')"),
             py::arg("update_seconds") = 0.0, py::arg("host_bytes") = std::numeric_limits<Bytes>::max(),
             py::arg("disk") = 0.0, Released(), "The record of the step that simulate_activations simulates.");
  module.def("judge_activations", &judge_plan, py::arg("cuts"), py::arg("plan"), py::kw_only(), py::arg("microbatches"),
             py::arg("budget"), py::arg("to_device"), py::arg("to_host"), py::arg("update_seconds"),
             py::arg("host_bytes"), py::arg("disk"), Released(),
             "The plan with the seconds that its treatment takes in this problem.");
}

}  // namespace hydra
