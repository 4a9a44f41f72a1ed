// Checks that a schedule can run, and that its batches use the versions of its rule.
//
//   on each rank   Every forward and backward occurs once. A backward comes after its forward, a reduction after the
//                  last backward of its batch, an update after its reduction and after the previous update; it begins
//                  where it may (update_placer.h). The version that a forward uses exists then, and until its backward
//                  has run. Every value that crosses is received before its use and sent after it is made.
//   between ranks  Both ends of each direction of a hop name microbatches in one order. No ranks block each other, even
//                  if every update waits for the reductions of all stages.
//   memory         The peaks below stay within limits.
//
// The checks read the actions of whole batches and a drain, not the bodies, so that actions of any origin can be
// verified.
#pragma once

#include <vector>

#include "csrc/schedule/batch_index.h"
#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

/// The largest counts at any one time.
struct Peaks {
  int in_flight = 0;  // microbatches between forward and backward, whose saved tensors are held
  int versions = 0;   // newest, in use, or being written; only the flush rule updates in place
  int gradients = 0;  // batches between first backward and update

  bool operator==(const Peaks&) const = default;
};

struct Verification {
  std::vector<Peaks> stages;
  std::vector<Peaks> ranks;  // of all stages of a rank together, at one time
  int batches = 0;           // how many were checked
  bool rendezvous = false;   // whether it also runs if a send blocks until its receive is posted
};

/// Limits on the peaks of each stage.
struct Limits {
  int in_flight = kUnlimited;
  int versions = kUnlimited;
  int gradients = kUnlimited;
};

/// Throws InvalidSchedule, which says what is wrong, where and why.
Verification verify(const Schedule& schedule, const Limits& limits = {});

/// Verifies the actions of all ranks, communication included, of batches with `sizes` microbatches.
Verification verify(const Schedule& schedule, const std::vector<Actions>& ranks, std::vector<int> sizes,
                    const Limits& limits = {});

}  // namespace hydra::schedule
