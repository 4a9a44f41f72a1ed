// Cuts a graph of layers into the stages of a pipeline, with replicas for each stage, so that the slowest stage is as
// fast as possible. The costs are those of cut_chain.h.
//
// On two levels, an outer stage is itself a pipeline on the machines of the inner level, all of which it uses. Its
// value there takes the place of its compute time; the inner pipeline's first stage has no transfer, and its last one
// pays the crossing of its end. The all-reduce term of the first outer stage is divided by the inner machines,
// as the published program has it.
//
// If the graph has few enough closed sets, all of them are cuts and the plan is optimal. Otherwise the cuts are a
// family (cut_family.h), and the bound comes from a relaxation (cut_relaxation.h).
//
// Reentrant. The work is limited by counts of steps, never by a clock, so that equal problems have equal plans.
#pragma once

#include <optional>
#include <vector>

#include "csrc/plan/cuts/profile_graph.h"

namespace hydra {

struct PipelineLevel {
  int machines = 1;
  double bytes_per_second = 1;
};

struct PipelineTerms {
  std::vector<PipelineLevel> levels;  // one, or two: the inner one first
  std::optional<double> memory_cap;   // bytes
  bool straight = false;              // one replica for each stage
  bool fewer = false;                 // machines of the last level may stay unused
  bool transfers = false;             // transfers of activations count
};

struct PipelineStage {
  int replicas = 1;
  std::vector<int> nodes;            // in the order of ProfileGraph::order
  std::vector<PipelineStage> inner;  // on two levels only
};

struct PipelinePartition {
  std::vector<PipelineStage> stages;  // empty if no plan is allowed, or no chain of the families is
  double objective_ms = 0;
  double bound_ms = 0;  // no plan of the problem has a smaller objective; infinity if no plan is allowed
};

/// Throws PlanError if the terms contradict the comments of their members.
PipelinePartition partition_pipeline(const ProfileGraph& graph, const PipelineTerms& terms);

}  // namespace hydra
