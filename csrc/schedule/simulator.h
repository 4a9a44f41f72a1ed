// Computes when a schedule's actions run, given the cost of each. Times are in seconds since the first action started.
//
// A rank computes one action after another, in its order. A sent value enters the hop once the values before it have
// left, occupies the hop for `transfer`, and arrives `latency` later. The reductions of a rank run one after another,
// beside its computes. An update waits for its own reduction, or for those of all stages if there is a norm over the
// whole model. Without overlap, sends and reductions block their rank until they are done.
//
// An update takes its time at U, as with an optimizer that cannot step behind other actions; BU takes none. For an
// optimizer that can, give the updates a cost of 0.
#pragma once

#include <vector>

#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

struct Costs {
  // Per stage; forward and backward for one microbatch.
  std::vector<double> forward;
  std::vector<double> backward;
  std::vector<double> update;
  std::vector<double> reduce;
  // Per hop from a stage to the next, in either direction.
  std::vector<double> transfer;
  std::vector<double> latency;
  bool overlap = true;
  bool global_norm = false;
};

struct TimedAction {
  Action action;
  int rank = 0;
  // A send lasts from when its value enters the hop until the value has arrived. A receive and BU take no time.
  double start = 0;
  double end = 0;
};

struct Timeline {
  std::vector<TimedAction> actions;  // rank by rank, each in its order
  double makespan = 0;
  double period = 0;            // the time that a batch adds to the makespan, averaged over the later half
  std::vector<double> busy;     // by rank: seconds in forwards, backwards and updates
  std::vector<double> bubbles;  // by rank: the share of a period that a batch's work leaves idle
};

/// Simulates `batches` steps and a drain. Throws InvalidSchedule unless costs are finite, not negative and one per
/// stage or hop, and for actions that block each other. In all other respects the schedule is assumed to be verified.
Timeline simulate(const Schedule& schedule, const Costs& costs, int batches);

}  // namespace hydra::schedule
