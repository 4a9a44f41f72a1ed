// Looks for stages between given downsets of which none takes longer than a limit. See unequal_split.h for the costs.
//
// One object serves one thread. It refers to graph and terms, which have to outlive it.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "csrc/plan/downset_table.h"
#include "csrc/plan/layer_graph.h"
#include "csrc/plan/recompute_choice.h"
#include "csrc/plan/unequal_split.h"

namespace hydra {

/// The numbers of replicas that a stage may have: divisors of the microbatches, up to the devices, ascending.
std::vector<int> replica_counts(const SplitTerms& terms);

class StageSearch {
 public:
  struct Plan {
    std::vector<SplitStage> stages;
    std::vector<LayerSet> cuts;  // the downsets between the stages
    double time = 0;
  };

  enum class Answer {
    kFound,
    kRefuted,  // no chain of the downsets has such stages
    kUnknown,  // the comparisons, or a knapsack's list, were used up
  };

  /// `downsets` hold the empty and the full set. Stops after so many comparisons.
  StageSearch(const LayerGraph& graph, const SplitTerms& terms, std::vector<LayerSet> downsets, double comparisons);

  /// Looks for a plan whose stages take at most `time`. Sets `plan` if the answer is kFound.
  Answer find(double time, std::optional<Plan>* plan);

 private:
  /// How the layers outside a downset are placed.
  struct Outside {
    int replicas = 0;        // that they need; kUnreachable if no stages were found
    std::size_t larger = 0;  // the downset at the end of the first stage
    int first_replicas = 0;  // of that stage
    int room = 0;            // for replicas outside: more leave too few for the downset, or were found before
  };
  /// What one `find` works on.
  struct Question {
    double time = 0;
    bool unknown = false;
    std::vector<Outside> outside;    // of each downset
    std::vector<double> keys;        // room, and what the downset's own layers need at least
    std::vector<std::size_t> worth;  // a try
  };

  void begin(double time);
  void extend(std::size_t larger);
  void try_stage(std::size_t smaller, std::size_t larger);
  bool allowed(std::size_t smaller, std::size_t larger, int replicas, const LayerSums& stage, double crossing_bytes);
  double communication(double crossing_bytes, double parameter_bytes, int replicas) const;
  int in_flight(int later, int replicas) const { return (later + replicas - 1) / replicas + 1; }
  Plan plan_found();

  const LayerGraph& graph_;
  const SplitTerms& terms_;
  const double memory_;
  const int most_replicas_;
  const std::vector<int> counts_;  // of replicas that a stage may have
  const DownsetTable table_;
  RecomputeChoice recompute_;
  double comparisons_left_;
  Question question_;
};

}  // namespace hydra
