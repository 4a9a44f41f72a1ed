// Bindings of the planner of activations, and of the step that it simulates. Values in, values out.
#include "csrc/plan/activation_plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bindings.h"
#include "csrc/plan/chain.h"
#include "csrc/testing/activation_enumeration.h"

namespace py = pybind11;

namespace hydra {

namespace {

using SegmentList = std::vector<ActivationSegment>;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();
constexpr Bytes kAllBytes = std::numeric_limits<Bytes>::max();

ActivationSegment make_segment(double forward_seconds, double backward_seconds, Bytes saved_fresh, Bytes saved_all,
                               Bytes inputs_fresh, Bytes inputs_all, Bytes parked_bytes, Bytes forward_bytes,
                               Bytes backward_bytes, Bytes live_gradient_bytes, Bytes weight_bytes, Bytes slot_bytes,
                               Bytes gradient_bytes, RecomputeScope recompute, std::optional<Bytes> stream_bytes,
                               double coding_seconds, const std::optional<std::vector<ActivationOption>>& options,
                               std::optional<std::pair<Bytes, double>> second) {
  ActivationSegment segment = {
      .forward_seconds = forward_seconds,
      .backward_seconds = backward_seconds,
      .saved = {saved_fresh, saved_all},
      .inputs = {inputs_fresh, inputs_all},
      .parked_bytes = parked_bytes,
      .forward_bytes = forward_bytes,
      .backward_bytes = backward_bytes,
      .weight_bytes = weight_bytes,
      .slot_bytes = slot_bytes,
      .gradients = {live_gradient_bytes, gradient_bytes},
      .coding = stream_bytes ? std::optional(SegmentCoding{*stream_bytes, coding_seconds}) : std::nullopt,
      .freedom = {recompute, {}, {}},
  };
  if (second) {
    segment.freedom.second = SecondForward{second->first, second->second};
  }
  if (options) {
    segment.freedom.refused.set();
    for (const ActivationOption option : *options) {
      segment.freedom.refused.reset(static_cast<std::size_t>(option));
    }
  }
  return segment;
}

ActivationProblem make_problem(std::vector<SegmentList> cuts, int microbatches, Bytes budget, double to_device,
                               double to_host, Bytes host_bytes, double update_seconds, std::vector<int> round_sizes,
                               double disk = 0) {
  return {std::move(cuts),
          microbatches,
          {budget, to_device, to_host, host_bytes, update_seconds, disk},
          std::move(round_sizes)};
}

std::tuple<double, double, double, double, Bytes> simulate_activations(
    SegmentList segments, std::vector<ActivationOption> options, int round_size, Bytes stash_bytes, int microbatches,
    Bytes budget, double to_device, double to_host, double update_seconds, Bytes host_bytes, double disk) {
  const ActivationProblem problem = make_problem({std::move(segments)}, microbatches, budget, to_device, to_host,
                                                 host_bytes, update_seconds, {}, disk);
  const ActivationPlan plan = judge_activations(problem, 0, {std::move(options), round_size, stash_bytes});
  return {plan.step.seconds, plan.step.compute_seconds, plan.step.to_device_seconds, plan.step.to_host_seconds,
          plan.peak_bytes};
}

Bytes least_of(std::vector<SegmentList> cuts, std::vector<int> round_sizes) {
  const int microbatches = round_sizes.empty() ? 1 : *std::max_element(round_sizes.begin(), round_sizes.end());
  return least_budget(
      make_problem(std::move(cuts), microbatches, 0, kNoLimit, kNoLimit, kAllBytes, 0, std::move(round_sizes)));
}

}  // namespace

void bind_activation_plan(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::enum_<ActivationOption>(module, "ActivationOption")
      .value("KEEP", ActivationOption::kKeep)
      .value("OFFLOAD", ActivationOption::kOffload)
      .value("COMPRESS", ActivationOption::kCompress)
      .value("RECOMPUTE", ActivationOption::kRecompute)
      .value("RECOMPUTE_OFFLOADED", ActivationOption::kRecomputeOffloaded);
  py::enum_<RecomputeScope>(module, "RecomputeScope")
      .value("NEVER", RecomputeScope::kNever)
      .value("ALONE", RecomputeScope::kAlone)
      .value("IN_ROUNDS", RecomputeScope::kInRounds);
  py::class_<ActivationSegment>(module, "ActivationSegment", "One microbatch of modules that run in one piece.")
      .def(py::init(&make_segment), py::kw_only(), py::arg("forward_seconds"), py::arg("backward_seconds"),
           py::arg("saved_fresh"), py::arg("saved_all"), py::arg("inputs_fresh"), py::arg("inputs_all"),
           py::arg("parked_bytes"), py::arg("forward_bytes"), py::arg("backward_bytes"), py::arg("live_gradient_bytes"),
           py::arg("weight_bytes"), py::arg("slot_bytes"), py::arg("gradient_bytes"),
           py::arg_v("recompute", RecomputeScope::kNever, "RecomputeScope.NEVER"), py::arg("stream_bytes") = py::none(),
           py::arg("coding_seconds") = 0.0, py::arg("options") = py::none(), py::arg("second") = py::none());
  py::class_<ActivationPlan>(module, "ActivationPlan")
      .def_readonly("cut", &ActivationPlan::cut)
      .def_property_readonly("options", [](const ActivationPlan& plan) { return plan.treatment.options; })
      .def_property_readonly("round_size", [](const ActivationPlan& plan) { return plan.treatment.round_size; })
      .def_property_readonly("stash_bytes", [](const ActivationPlan& plan) { return plan.treatment.stash_bytes; })
      .def_property_readonly("seconds", [](const ActivationPlan& plan) { return plan.step.seconds; })
      .def_property_readonly("compute_seconds", [](const ActivationPlan& plan) { return plan.step.compute_seconds; })
      .def_property_readonly("to_device_seconds",
                             [](const ActivationPlan& plan) { return plan.step.to_device_seconds; })
      .def_property_readonly("to_host_seconds", [](const ActivationPlan& plan) { return plan.step.to_host_seconds; })
      .def_readonly("peak_bytes", &ActivationPlan::peak_bytes);
  module.def(
      "plan_activations",
      [](std::vector<SegmentList> cuts, int microbatches, Bytes budget, double to_device, double to_host,
         Bytes host_bytes, double update_seconds, std::vector<int> round_sizes, double effort, double disk) {
        return plan_activations(make_problem(std::move(cuts), microbatches, budget, to_device, to_host, host_bytes,
                                             update_seconds, std::move(round_sizes), disk),
                                effort);
      },
      py::arg("cuts"), py::kw_only(), py::arg("microbatches"), py::arg("budget"),
      py::arg_v("to_device", kNoLimit, "float('inf')"), py::arg_v("to_host", kNoLimit, "float('inf')"),
      py::arg("host_bytes") = kAllBytes, py::arg("update_seconds") = 0.0, py::arg("round_sizes") = std::vector<int>(),
      py::arg("effort") = 1.0, py::arg("disk") = 0.0, Released(),
      "The fastest treatment found that fits. Lanes are in bytes a second. No round_sizes: all that are worth trying.");
  module.def("simulate_activations", &simulate_activations, py::arg("segments"), py::kw_only(), py::arg("options"),
             py::arg("round_size"), py::arg("stash_bytes"), py::arg("microbatches"), py::arg("budget"),
             py::arg_v("to_device", kNoLimit, "float('inf')"), py::arg_v("to_host", kNoLimit, "float('inf')"),
             py::arg("update_seconds") = 0.0, py::arg("host_bytes") = kAllBytes, py::arg("disk") = 0.0, Released(),
             "Seconds of the step, of compute, of the lanes to device and host, and the peak's bytes.");
  module.def("least_activation_budget", &least_of, py::arg("cuts"), py::kw_only(),
             py::arg("round_sizes") = std::vector<int>(), Released(), "The least budget that any treatment fits.");
  module.def_submodule("testing").def(
      "least_activation_seconds",
      [](SegmentList segments, int microbatches, Bytes budget, double to_device, double to_host) {
        return testing::least_activation_seconds(
            make_problem({std::move(segments)}, microbatches, budget, to_device, to_host, kAllBytes, 0, {}));
      },
      py::arg("segments"), py::kw_only(), py::arg("microbatches"), py::arg("budget"), py::arg("to_device"),
      py::arg("to_host"), Released(), "The least seconds of all treatments, one after another.");
}

}  // namespace hydra
