// A family of closed sets as the cuts of a pipeline, and the best pipeline with these cuts: exact in the family.
// Plain values, reentrant. Costs and units are those of cut_chain.h and pipeline_partition.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/plan/cuts/cut_chain.h"
#include "csrc/plan/cuts/pipeline_partition.h"

namespace hydra {

/// Terms of one level of machines, from 0 for the inner one.
ChainTerms chain_terms(const PipelineTerms& terms, std::size_t level);

/// Sorted so that a set comes behind its subsets: begins with the empty set and ends with the whole graph.
struct CutFamily {
  std::vector<NodeSet> sets;
  std::vector<Cut> cuts;
  CutOrder order{0};

  /// Pairs of a set and one that contains it.
  std::size_t pairs = 0;
};

/// Adds the empty set and the whole graph, and drops repeated sets.
CutFamily cut_family(const ProfileGraph& graph, std::vector<NodeSet> sets);

/// The sets with the least crossing: up to `most` in each of `steps` equal steps of compute time.
std::vector<NodeSet> thinned(const ProfileGraph& graph, std::vector<NodeSet> sets, std::size_t steps, std::size_t most);

struct ChosenStage {
  int replicas = 1;
  NodeSet before;
  NodeSet after;
  std::vector<ChosenStage> inner;  // on two levels only
};

struct FamilyBest {
  std::vector<ChosenStage> stages;  // empty if no chain is allowed, or none beats the given value
  double value = kUnbounded;
  double bound = 0;       // of chains in the family
  std::int64_t work = 0;  // steps
};

/// As best_chain, for one or two levels.
FamilyBest best_in_family(const CutFamily& family, const PipelineTerms& terms, double bound, double known,
                          double precision);

}  // namespace hydra
