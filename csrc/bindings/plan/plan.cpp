// Bindings of the planners, which take and return plain values. hydra_ext.plan is the public interface.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "csrc/bindings/bindings.h"
#include "csrc/plan/chain_partition.h"
#include "csrc/plan/unequal_split.h"

namespace py = pybind11;

namespace hydra {

namespace {

using EventValues = std::tuple<double, double, Bytes, Bytes>;
using BoundaryValues = std::tuple<Bytes, bool>;
using SharedValues = std::tuple<Bytes, std::vector<int>>;
using LayerValues = std::tuple<std::array<double, 3>, std::array<double, 3>, double>;
using EdgeValues = std::tuple<std::size_t, std::size_t, double>;
using SplitStageValues = std::tuple<int, std::vector<std::size_t>, std::vector<std::size_t>>;
using SplitValues = std::tuple<std::vector<SplitStageValues>, double, std::optional<double>>;

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

LayerGraph make_layer_graph(const std::vector<LayerValues>& layers, const std::vector<EdgeValues>& edges) {
  LayerGraph graph;
  for (const auto& [kept, recomputed, parameters] : layers) {
    graph.layers.push_back({{kept[0], kept[1], kept[2]}, {recomputed[0], recomputed[1], recomputed[2]}, parameters});
  }
  for (const auto& [from, to, bytes] : edges) {
    graph.edges.push_back({from, to, bytes});
  }
  return graph;
}

SplitValues values_of(const UnequalSplit& split) {
  std::vector<SplitStageValues> stages;
  for (const SplitStage& stage : split.stages) {
    stages.emplace_back(stage.replicas, stage.layers, stage.recomputed);
  }
  return {stages, split.time, split.bound};
}

}  // namespace

void bind_plan(py::module_& module) {
  py::register_local_exception_translator(&translate_plan_error);
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
  module.def(
      "split_unequally",
      [](const std::vector<LayerValues>& layers, const std::vector<EdgeValues>& edges, double memory, double bandwidth,
         int devices, int microbatches) {
        const py::gil_scoped_release released;
        return values_of(split_unequally(make_layer_graph(layers, edges), {memory, bandwidth, devices, microbatches}));
      },
      py::arg("layers"), py::arg("edges"), py::kw_only(), py::arg("memory"), py::arg("bandwidth"), py::arg("devices"),
      py::arg("microbatches"),
      "Layers are (kept, recomputed, parameter bytes), each way (time, bytes a microbatch, fixed bytes); edges (from, "
      "to, bytes). Returns stages (replicas, layers, recomputed layers), time and bound.");
}

}  // namespace hydra
