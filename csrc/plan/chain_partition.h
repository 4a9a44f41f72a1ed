// The best division of a chain into a given number of stages: exact, by dynamic programming in O(events^2 * stages).
//
// Best is, in this order: the least seconds of the slowest stage (which are the period of a full pipeline); the fewest
// crossing bytes at all cuts together; the most even stages (the least sum of their squared seconds). Periods that
// differ by less than one part in 10^12 count as equal: sums of the same seconds do, in another order.
//
// No threads, no state.
#pragma once

#include <vector>

#include "csrc/plan/chain.h"

namespace hydra {

struct PlannedStage {
  int begin = 0;  // first event
  int end = 0;    // the one after the last
  double compute_seconds = 0;
  double communication_seconds = 0;
  double seconds = 0;
  Bytes bytes = 0;
};

struct ChainPartition {
  std::vector<PlannedStage> stages;
  double period_seconds = 0;  // of the slowest stage
  Bytes crossing_bytes = 0;   // at all cuts together
};

/// Every stage has at least one event. Throws PlanDoesNotFit where the limits of memory allow no division, PlanError
/// where there are not as many possible cuts or the input makes no sense.
ChainPartition partition_chain(const Chain& chain, const StageTerms& terms);

}  // namespace hydra
