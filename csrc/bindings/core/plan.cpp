// Bindings of the planners, which take and return plain values. hydra_ext.plan is the public interface.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "csrc/bindings/bindings.h"
#include "csrc/plan/chain_partition.h"
#include "csrc/plan/checkpoint_chain.h"

namespace py = pybind11;

namespace hydra {

namespace {

using EventValues = std::tuple<double, double, Bytes, Bytes>;
using BoundaryValues = std::tuple<Bytes, bool>;
using SharedValues = std::tuple<Bytes, std::vector<int>>;
using CheckpointStageValues = std::tuple<double, double, Bytes, Bytes, Bytes, Bytes>;

void translate_plan_error(std::exception_ptr error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const PlanDoesNotFit& known) {
    const py::object type = py::module_::import("hydra_ext.errors").attr("PlanDoesNotFit");
    const py::object raised = type(known.what(), py::arg("stage") = known.stage, py::arg("needed_bytes") = known.needed,
                                   py::arg("limit_bytes") = known.limit);
    PyErr_SetObject(type.ptr(), raised.ptr());
  } catch (const PlanError& known) {
    PyErr_SetString(py::module_::import("hydra_ext.errors").attr("PlanError").ptr(), known.what());
  }
}

Chain make_chain(const std::vector<EventValues>& events, const std::vector<BoundaryValues>& boundaries,
                 const std::vector<SharedValues>& shared) {
  Chain chain;
  for (const auto& [forward, backward, parameters, activations] : events) {
    chain.events.push_back({forward, backward, parameters, activations});
  }
  for (const auto& [crossing, possible] : boundaries) {
    chain.boundaries.push_back({crossing, possible});
  }
  for (const auto& [bytes, users] : shared) {
    chain.shared.push_back({bytes, users});
  }
  return chain;
}

void bind_checkpoints(py::module_& module) {
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

}  // namespace

void bind_plan(py::module_& module) {
  py::register_exception_translator(&translate_plan_error);
  py::class_<PlannedStage>(module, "PlannedStage")
      .def_readonly("begin", &PlannedStage::begin)
      .def_readonly("end", &PlannedStage::end)
      .def_readonly("compute_seconds", &PlannedStage::compute_seconds)
      .def_readonly("communication_seconds", &PlannedStage::communication_seconds)
      .def_readonly("seconds", &PlannedStage::seconds)
      .def_readonly("bytes", &PlannedStage::bytes);
  py::class_<ChainPartition>(module, "ChainPartition")
      .def_readonly("stages", &ChainPartition::stages)
      .def_readonly("period_seconds", &ChainPartition::period_seconds)
      .def_readonly("crossing_bytes", &ChainPartition::crossing_bytes);
  module.def(
      "partition_chain",
      [](const std::vector<EventValues>& events, const std::vector<BoundaryValues>& boundaries,
         const std::vector<SharedValues>& shared, double bandwidth, double latency, bool overlapped, int versions,
         std::vector<std::optional<Bytes>> limits) {
        const py::gil_scoped_release released;
        return partition_chain(make_chain(events, boundaries, shared),
                               {bandwidth, latency, overlapped, versions, std::move(limits)});
      },
      py::arg("events"), py::arg("boundaries"), py::arg("shared"), py::kw_only(), py::arg("bandwidth"),
      py::arg("latency"), py::arg("overlapped"), py::arg("versions"), py::arg("limits"),
      "Events are (forward seconds, backward seconds, parameter bytes, activation bytes), boundaries (crossing bytes, "
      "possible), shared parameters (bytes, events).");
  bind_checkpoints(module);
}

}  // namespace hydra
