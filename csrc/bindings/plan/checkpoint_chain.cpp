// Bindings of the planner of checkpoints. hydra_ext.plan is the public interface.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "csrc/bindings/bindings.h"
#include "csrc/plan/checkpoint_chain.h"

namespace py = pybind11;

namespace hydra {

namespace {

using CheckpointStageValues = std::tuple<double, double, Bytes, Bytes, Bytes, Bytes>;

}  // namespace

void bind_checkpoint_chain(py::module_& module) {
  py::enum_<CheckpointClass>(module, "CheckpointClass")
      .value("PERSISTENT", CheckpointClass::kPersistent)
      .value("FLAT", CheckpointClass::kFlat);
  using Kind = CheckpointStep::Kind;
  py::enum_<Kind>(module, "CheckpointStepKind")
      .value("FORWARD", Kind::kForward)
      .value("FORWARD_SAVING", Kind::kForwardSaving)
      .value("BACKWARD", Kind::kBackward)
      .value("DROP", Kind::kDrop);
  py::class_<CheckpointPlan>(module, "CheckpointPlan")
      .def_readonly("time", &CheckpointPlan::time)
      .def_readonly("bound", &CheckpointPlan::bound)
      .def_property_readonly("steps", [](const CheckpointPlan& plan) {
        std::vector<std::tuple<Kind, int>> steps;
        for (const CheckpointStep& step : plan.steps) {
          steps.emplace_back(step.kind, step.index);
        }
        return steps;
      });
  module.def(
      "plan_checkpoints",
      [](Bytes input_bytes, const std::vector<CheckpointStageValues>& stages, Bytes memory, CheckpointClass type) {
        const py::gil_scoped_release released;
        CheckpointChain chain = {input_bytes, {}};
        for (const auto& [forward, backward, output, saved, forward_transient, backward_transient] : stages) {
          chain.stages.push_back({forward, backward, output, saved, forward_transient, backward_transient});
        }
        return plan_checkpoints(chain, memory, type);
      },
      py::arg("input_bytes"), py::arg("stages"), py::kw_only(), py::arg("memory"), py::arg("type"),
      "Stages are (forward time, backward time, output bytes, saved bytes, forward transient, backward transient). "
      "Steps count from 0.");
}

}  // namespace hydra
