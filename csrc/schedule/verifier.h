// Whether a schedule can run, and gives what its version rule says.
//
//   on each rank   every forward and backward once; a backward after its forward, a reduction after the last
//                  backward of its batch, an update after its reduction and after the update before, and begun where it
//                  may be (update_placer.h); the version that a forward uses is there then, and when its backward runs;
//                  everything that crosses is received before it is used and sent after it is made
//   between ranks  both ends of each direction of a hop name microbatches in one order; no ranks block each other, also
//                  where every update waits for the reductions of all stages
//   memory         the peaks below, against limits
//
// All of it is asked of the actions of whole batches and a drain, not of the bodies, so that whatever makes actions can
// be verified.
#pragma once

#include <vector>

#include "csrc/schedule/batch_index.h"
#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

/// The most that there was at one time.
struct Peaks {
  int in_flight = 0;  // microbatches between forward and backward: what they stash is held
  int versions = 0;   // newest, in use, or being written; a flush updates in place, any other rule beside
  int gradients = 0;  // batches between first backward and update

  bool operator==(const Peaks&) const = default;
};

struct Verification {
  std::vector<Peaks> stages;
  std::vector<Peaks> ranks;  // of its stages together, at one time
  int batches = 0;           // that were run through
  bool rendezvous = false;   // also where a send blocks until its receive was posted
};

/// Of each stage.
struct Limits {
  int in_flight = kUnlimited;
  int versions = kUnlimited;
  int gradients = kUnlimited;
};

/// Throws InvalidSchedule that says what is wrong, where and why.
Verification verify(const Schedule& schedule, const Limits& limits = {});

/// Of all the actions of all ranks, communication included, for batches with `sizes` microbatches.
Verification verify(const Schedule& schedule, const std::vector<Actions>& ranks, std::vector<int> sizes,
                    const Limits& limits = {});

}  // namespace hydra::schedule
