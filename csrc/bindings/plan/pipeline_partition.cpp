// Bindings of the planner of profiled graphs. hydra_ext.plan is the public interface.
#include "csrc/plan/cuts/pipeline_partition.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bindings.h"

namespace py = pybind11;

namespace hydra {

namespace {

using ProfiledLayerValues = std::tuple<double, double, double>;
using LevelValues = std::tuple<int, double>;

py::list stage_values(const std::vector<PipelineStage>& stages) {
  py::list found;
  for (const PipelineStage& stage : stages) {
    found.append(py::make_tuple(stage.replicas, stage.nodes, stage_values(stage.inner)));
  }
  return found;
}

PipelinePartition partitioned(const std::vector<ProfiledLayerValues>& layers,
                              const std::vector<ProfileGraph::Edge>& edges, const std::vector<LevelValues>& levels,
                              PipelineTerms terms) {
  std::vector<ProfileNode> nodes;
  for (const auto& [compute, activations, parameters] : layers) {
    nodes.push_back({compute, activations, parameters});
  }
  for (const auto& [machines, bandwidth] : levels) {
    terms.levels.push_back({machines, bandwidth});
  }
  return partition_pipeline(ProfileGraph(std::move(nodes), edges), terms);
}

}  // namespace

void bind_pipeline_partition(py::module_& module) {
  module.def(
      "partition_pipeline",
      [](const std::vector<ProfiledLayerValues>& layers, const std::vector<ProfileGraph::Edge>& edges,
         const std::vector<LevelValues>& levels, std::optional<double> memory_cap, bool straight, bool fewer,
         bool transfers) -> py::object {
        PipelinePartition found;
        {
          const py::gil_scoped_release released;
          found = partitioned(layers, edges, levels, {{}, memory_cap, straight, fewer, transfers});
        }
        if (found.stages.empty()) {
          return py::none();
        }
        return py::make_tuple(found.objective_ms, found.bound_ms, stage_values(found.stages));
      },
      py::arg("layers"), py::arg("edges"), py::kw_only(), py::arg("levels"), py::arg("memory_cap"), py::arg("straight"),
      py::arg("fewer"), py::arg("transfers"),
      "Layers are (compute ms, activation bytes, parameter bytes), levels (machines, bytes per second), the inner one "
      "first. Returns (objective ms, bound ms, [(replicas, layers, inner stages)]), or None if nothing fits.");
}

}  // namespace hydra
