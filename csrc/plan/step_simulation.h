// What a step of a chain of segments takes under a treatment: memory, and seconds with all waits.
//
// Memory in forward and backward of segment i, with rounds of r microbatches:
//
//   stash + kept by segments before i + r * kept_i + in use + (r - 1) * parked_i + weights_i
//         + in backward: gradients_i, and all that was saved if the segment runs again
//
// Gradients are those of a microbatch that are being summed. In larger rounds they are all of the segment's, if these
// are more.
//
// In use is what forward and backward take, whichever is more, in a backward that runs forward again.
//
// Kept bytes are all saved bytes of `keep`, all inputs of `recompute`, else none. Several segments may keep the same
// storage. So until a segment no more is kept than all segments until then have saved first, and the inputs of those
// that run again. The last segment is what runs outside of the others, and may have saved at any time. With rounds of
// 1, weights are those of the largest block, else the segment's.
//
// Time: compute and two lanes, one to the device and one to the host. Weights stay as far as there is room: those that
// are used last leave first, in part if that is enough, so that more room is hardly ever slower. The others come
// ahead, as soon as there is room for them; weights that stay until then make way.
//
// What is saved leaves while its forward goes on, as far as there is room beside all else; else forward waits. When the
// next segment begins, no more is on its way than the stash holds, with what later segments keep: their room is free
// until then. Backward's bytes come in the order of their use, as far ahead as there is room of this kind since
// backward began. What has none comes when it is read. The segments that come first fill the host. What it cannot hold
// takes the disk's seconds on top of the lane's, each way. Gradients leave after each backward of a segment. The
// optimizer's seconds count as far as they exceed the forward that they run behind: that of the next step's first
// round, which reads every weight.
//
// A record says what compute and the lanes do when. It changes no result.
//
// Deterministic and reentrant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/plan/activation_chain.h"

namespace hydra {

/// Bytes of one microbatch, of a segment by itself.
Bytes kept_bytes(const ActivationSegment& segment, ActivationOption option);
Bytes moved_bytes(const ActivationSegment& segment, ActivationOption option);
/// Bytes of one microbatch that the segments until each one keep together.
std::vector<Bytes> kept_until(const std::vector<ActivationSegment>& segments,
                              const std::vector<ActivationOption>& options);
/// Seconds of compute of one microbatch, forward and backward.
double compute_seconds(const ActivationSegment& segment, ActivationOption option);
/// The most that the segment needs, beside the stash and what segments before it keep, which may be some of the same.
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

enum class StepWorkKind : std::uint8_t {
  kForward,  // of one microbatch, as are kRecompute and kBackward: compute
  kRecompute,
  kBackward,
  kUpdate,         // as far as the next forward does not hide it
  kBringWeights,   // to the device
  kBringStash,     // to the device, of one microbatch
  kSendStash,      // to the host, of one microbatch
  kSendGradients,  // to the host
};

struct StepWork {
  StepWorkKind kind = StepWorkKind::kForward;
  std::optional<std::size_t> segment;  // none: an update
  double begin = 0;                    // seconds since the step began
  double end = 0;
  Bytes bytes = 0;  // moved
};

struct StepRecord {
  std::vector<StepWork> work;  // what each lane does is in the order of time
  /// When each stay begins. A stay is the time of a round in a segment, forward or backward, waits included.
  std::vector<double> stays;
};

/// For a treatment whose peak is within the machine's budget. Adds to the record, if there is one.
SimulatedStep simulate_step(const std::vector<ActivationSegment>& segments, const ActivationMachine& machine,
                            int microbatches, const ActivationTreatment& treatment, StepRecord* record = nullptr);

}  // namespace hydra
