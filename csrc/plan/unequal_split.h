// Cuts a graph of layers into stages of any size, each with its own number of replicas and its own recomputed layers,
// so that the slowest stage is as fast as possible.
//
// The cost model is that of Piper (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021) without tensor parallelism. A stage
// with d replicas takes, for one microbatch,
//
//   (2 * bytes of edges with one end in it / d + 4 * (d - 1) / d * its parameter bytes / microbatches) / bandwidth
//     + its layers' times / d
//
// Its layers hold, with y = ceil(replicas of this and all later stages / d), sum(bytes_per_microbatch * y +
// fixed_bytes) <= memory. d divides the microbatches of a batch. All replicas together are at most `devices` and at
// most `microbatches`.
//
// The search asks: can all stages take at most T? Fewer replicas in later stages never hurt an earlier one: its y
// falls. So one number for each downset decides: the fewest replicas that all layers outside it need. T is then
// bisected, and in the end a T just below the best plan's is refuted. With all downsets this is exact. If the graph has
// too many, the search uses the prefixes of some orders, and downsets near the best plan's.
//
// Reentrant, without state. Equal means: to one part in 10^10.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "csrc/plan/layer_graph.h"

namespace hydra {

struct SplitTerms {
  double memory = 0;     // bytes of a device
  double bandwidth = 0;  // bytes per unit of time
  int devices = 0;
  int microbatches = 0;  // of a batch
};

struct SplitStage {
  int replicas = 0;
  std::vector<std::size_t> layers;      // ascending
  std::vector<std::size_t> recomputed;  // ascending
};

struct UnequalSplit {
  std::vector<SplitStage> stages;  // empty if none was found
  double time = 0;                 // of the slowest stage, for one microbatch
  std::optional<double> bound;     // no plan takes less; nullopt if there is no plan
};

struct SearchLimits {
  std::size_t downsets = 40'000;  // of a graph that is searched exactly
  double comparisons = 2e10;      // of pairs of downsets; after that the best plan so far is returned
};

/// Throws PlanError if numbers are negative or not finite, or if the edges form a cycle.
UnequalSplit split_unequally(const LayerGraph& graph, const SplitTerms& terms, const SearchLimits& limits = {});

}  // namespace hydra
