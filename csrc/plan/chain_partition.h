// Finds the best division of a chain into a given number of stages. Exact; dynamic programming in
// O(events^2 * stages).
//
// The best division has the fewest seconds in its slowest stage, which are the period of a full pipeline. Among equals
// it has the fewest crossing bytes at all cuts together, then the most even stages: the smallest sum of squared
// seconds. Periods that differ by less than one part in 10^12 count as equal, since the order of additions changes that
// much.
//
// Reentrant, without state. Units are those of chain.h.
#pragma once

#include <vector>

#include "csrc/plan/chain.h"

namespace hydra {

struct PlannedStage {
  int begin = 0;  // first event
  int end = 0;    // the event after the last one
  double compute_seconds = 0;
  double communication_seconds = 0;
  double seconds = 0;
  Bytes bytes = 0;
};

struct ChainPartition {
  std::vector<PlannedStage> stages;
  double period_seconds = 0;  // the slowest stage's seconds
  Bytes crossing_bytes = 0;   // at all cuts together
};

/// Gives every stage at least one event. Throws PlanDoesNotFit if the limits of memory allow no division, and PlanError
/// if the chain has too few possible cuts or the input makes no sense.
ChainPartition partition_chain(const Chain& chain, const StageTerms& terms);

}  // namespace hydra
