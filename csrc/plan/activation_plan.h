// Finds how a step treats what its segments save, so that it fits a device's budget and is as fast as possible: one
// option for each segment, the size of rounds, and the stash's room.
//
// The seconds of a treatment are those that simulate_step says. Candidates come from dynamic programming: kept bytes of
// the segments before one are all that memory depends on, so the cheapest options for weighted seconds of compute and
// lanes are found exactly, up to the grid of kept bytes. Several weights give several candidates. From the fastest ones
// a local search goes on: other options for one segment or two, another size of rounds or of the stash; then from
// changed copies of the fastest. A few smaller budgets come first, and hand on what they find.
//
// The search counts its work, and ends when the effort is used up: no clock, and the same result on every machine.
// Where rounds, cuts and sizes of the stash are more than half of the effort can try, it tries some of them, without a
// pattern. Even without effort a few hundred are tried.
// Reentrant, without state.
#pragma once

#include <cstddef>
#include <vector>

#include "csrc/plan/activation_chain.h"
#include "csrc/plan/step_simulation.h"

namespace hydra {

struct ActivationProblem {
  /// The model in segments, in one or several ways: finer and coarser.
  std::vector<std::vector<ActivationSegment>> cuts;
  int microbatches = 1;
  ActivationMachine machine;
  std::vector<int> round_sizes;  // the only ones to try; empty: those of round_sizes(microbatches)
};

struct ActivationPlan {
  std::size_t cut = 0;
  ActivationTreatment treatment;
  SimulatedStep step;
  Bytes peak_bytes = 0;
};

/// The least budget that any treatment fits: that of the neediest segment in the best cut and size of rounds, with
/// nothing kept but what policies keep. Throws PlanError if the problem makes no sense, or if in every cut a segment
/// allows no option in rounds of these sizes.
Bytes least_budget(const ActivationProblem& problem);

/// The sizes of rounds that are tried unless others are given, and those of the stash.
std::vector<int> round_sizes(int microbatches);
std::vector<Bytes> stash_sizes(const std::vector<ActivationSegment>& segments);

/// `effort` of 1 is about a tenth of a second, and 1000 is the most. Throws PlanDoesNotFit if the budget is below the
/// least, and PlanError if the problem makes no sense.
ActivationPlan plan_activations(const ActivationProblem& problem, double effort = 1.0);

/// What a treatment of a cut takes. Adds to the record, if there is one. Throws PlanDoesNotFit if the treatment's peak
/// exceeds the budget, and PlanError if it makes no sense.
ActivationPlan judge_activations(const ActivationProblem& problem, std::size_t cut,
                                 const ActivationTreatment& treatment, StepRecord* record = nullptr);

}  // namespace hydra
