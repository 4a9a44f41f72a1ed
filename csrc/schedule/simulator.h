// When a schedule's actions run, given what each costs. Seconds, from the start of the first.
//
// A rank computes one action after the other, in its order. A send's value takes the hop when those before it have left
// it, occupies it for `transfer`, and arrives `latency` later. Reductions of a rank run one after the other beside its
// computes; an update waits for its own, or for those of all stages where there is a norm over the whole model. Without
// overlap sends and reductions hold up their rank until they are done.
//
// An update takes its time at U, as with an optimizer that cannot step behind other actions; BU takes none. The cost of
// an update that is made behind them is 0.
#pragma once

#include <vector>

#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

struct Costs {
  // Of each stage; for forward and backward, of one microbatch.
  std::vector<double> forward;
  std::vector<double> backward;
  std::vector<double> update;
  std::vector<double> reduce;
  // Of the hop from each stage but the last to the next, either way.
  std::vector<double> transfer;
  std::vector<double> latency;
  bool overlap = true;
  bool global_norm = false;
};

struct TimedAction {
  Action action;
  int rank = 0;
  // Of a send: from when it has the hop until its value has arrived. A receive and BU take no time.
  double start = 0;
  double end = 0;
};

struct Timeline {
  std::vector<TimedAction> actions;  // rank by rank, each in its order
  double makespan = 0;
  double period = 0;            // that a batch adds to the makespan, over the later half of them
  std::vector<double> busy;     // of each rank: in forwards, backwards and updates
  std::vector<double> bubbles;  // of each rank: the part of a period that a batch's work leaves over
};

/// `batches` steps and a drain. Throws InvalidSchedule for costs that are not one per stage or hop, negative or not
/// finite, and for actions that block each other; for the rest the schedule is taken as verified.
Timeline simulate(const Schedule& schedule, const Costs& costs, int batches);

}  // namespace hydra::schedule
