// What a step of a chain of segments takes under a treatment: memory, and seconds with all waits.
//
// Memory in forward and backward of segment i, with rounds of r microbatches:
//
//   stash + kept by segments before i + r * kept_i + in use + (r - 1) * parked_i + weights_i
//         + in backward: gradients_i, and all that was saved if the segment runs again
//
// In use is what forward and backward take, whichever is more, in a backward that runs forward again.
//
// Kept bytes are all saved bytes of `keep`, all inputs of `recompute`, else none. With rounds of 1, weights are those
// of the largest block, else the segment's.
//
// Time: compute and two lanes, one to the device and one to the host. Weights stay as far as there is room: those that
// are used last leave first, in part if that is enough, so that more room is never slower. They come one segment ahead
// if there is room. What is saved leaves while forward goes on,
// as long as the stash has room; else forward waits. Backward's bytes come in the order of their use, as far ahead as
// the stash has room. The segments that come first fill the host. What it cannot hold takes the disk's seconds on top
// of the lane's, each way. Gradients leave after each backward of a segment. The optimizer's seconds count as far as
// they exceed the forward that they run behind.
//
// Deterministic and reentrant.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/plan/activation_chain.h"

namespace hydra {

/// Bytes of one microbatch.
Bytes kept_bytes(const ActivationSegment& segment, ActivationOption option);
Bytes moved_bytes(const ActivationSegment& segment, ActivationOption option);
/// Seconds of compute of one microbatch, forward and backward.
double compute_seconds(const ActivationSegment& segment, ActivationOption option);
/// The most that the segment needs, beside the stash and what segments before it keep.
Bytes needed_bytes(const ActivationSegment& segment, ActivationOption option, int round_size);

/// The most bytes on the device at once, without weights that stay only because there is room.
Bytes peak_bytes(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment);
/// Bytes that are off the device at once.
Bytes host_bytes(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment);
/// Whether the host can hold them, or has a disk.
bool fits_host(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment,
               const ActivationMachine& machine);

struct SimulatedStep {
  double seconds = 0;
  double compute_seconds = 0;    // that compute is busy
  double to_device_seconds = 0;  // that the lane is busy
  double to_host_seconds = 0;
};

/// For a treatment whose peak is within the machine's budget.
SimulatedStep simulate_step(const std::vector<ActivationSegment>& segments, const ActivationMachine& machine,
                            int microbatches, const ActivationTreatment& treatment);

}  // namespace hydra
