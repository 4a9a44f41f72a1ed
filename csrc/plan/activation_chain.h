// A training step as a chain of segments: what a planner of activations is given, measured in one microbatch.
//
// A segment is a module, or several in a row, that runs in one piece. Forward passes the segments in order, backward in
// reverse. A step has several microbatches. A round takes `round_size` of them through each segment before the next
// segment, with the segment's weights pinned; with rounds of 1 microbatches follow each other, and weights come piece
// by piece. What a segment saves for its backward is treated by one option:
//
//   keep                 stays on the device
//   offload              leaves as it is saved, and comes back for backward
//   compress             likewise, as a stream
//   recompute            is dropped; the inputs stay on the device, and the segment runs forward again in backward,
//                        until it has saved its last tensor
//   recompute offloaded  likewise, but the inputs leave and come back
//
// What leaves or comes ahead of its use is in the stash. It has `stash_bytes`, and the room of what is not yet kept or
// not any more.
//
// Units are bytes, seconds and bytes a second. Plain values.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "csrc/base/types.h"

namespace hydra {

enum class ActivationOption : std::uint8_t { kKeep, kOffload, kCompress, kRecompute, kRecomputeOffloaded };

inline constexpr std::array kActivationOptions = {ActivationOption::kKeep, ActivationOption::kOffload,
                                                  ActivationOption::kCompress, ActivationOption::kRecompute,
                                                  ActivationOption::kRecomputeOffloaded};

/// Options, each at the place of its number.
using OptionBits = std::bitset<kActivationOptions.size()>;

/// Where a segment may run forward again. Inside a round, blocks that begin in the segment forbid it.
enum class RecomputeScope : std::uint8_t {
  kNever,
  kAlone,     // with rounds of 1
  kInRounds,  // with rounds of any size
};

/// How a segment runs again. It can do so in pieces: what a piece saves is dropped again, and the piece runs once more
/// in its own backward.
struct SecondForward {
  Bytes bytes = 0;     // that are there at once; in pieces: the inputs of all, and what the largest one saves
  double seconds = 0;  // of the second forward, and of the third ones of pieces
};

/// What a segment's own limits and its module's policy leave to the planner.
struct SegmentFreedom {
  RecomputeScope recompute = RecomputeScope::kNever;
  OptionBits refused;
  std::optional<SecondForward> second;  // none: it saves and takes as much as the first
};

/// Bytes of storages. One that an earlier segment has saved is not new, but it stays if any segment keeps it.
struct StorageBytes {
  Bytes fresh = 0;
  Bytes all = 0;  // at least `fresh`
};

/// Bytes of gradients of a segment's weights.
struct GradientBytes {
  Bytes live = 0;  // that add to the most in use in backward, if each leaves as soon as it is summed
  Bytes all = 0;   // that leave after the backward of a round
};

struct SegmentCoding {
  Bytes stream_bytes = 0;  // of all that is fresh
  double seconds = 0;      // to compress and to decode
};

/// One microbatch of a segment.
struct ActivationSegment {
  double forward_seconds = 0;   // without waits
  double backward_seconds = 0;  // without waits and without running forward again
  StorageBytes saved;           // for backward
  StorageBytes inputs;          // that a second forward needs
  Bytes parked_bytes = 0;       // alive after it: outputs, and what later segments read of earlier ones
  Bytes forward_bytes = 0;      // the most in use at once if what is saved leaves at once
  Bytes backward_bytes = 0;     // likewise, if what was saved comes when it is read; without gradients of weights
  Bytes weight_bytes = 0;
  Bytes slot_bytes = 0;  // of its largest block: the least of its weights that is on the device
  GradientBytes gradients;
  std::optional<SegmentCoding> coding;  // none: not to be compressed
  SegmentFreedom freedom;
};

struct ActivationMachine {
  Bytes budget = 0;
  double to_device = std::numeric_limits<double>::infinity();  // bytes a second
  double to_host = std::numeric_limits<double>::infinity();
  Bytes host_bytes = std::numeric_limits<Bytes>::max();  // for activations
  double update_seconds = 0;                             // of the optimizer, behind the next step's first round
  // Bytes a second, each way, of activations that `host_bytes` cannot hold. 0: no treatment may need it.
  double disk = 0;
};

/// What decides how a step runs.
struct ActivationTreatment {
  std::vector<ActivationOption> options;  // one for each segment
  int round_size = 1;
  Bytes stash_bytes = 0;

  bool operator==(const ActivationTreatment&) const = default;
};

inline bool allows(const ActivationSegment& segment, ActivationOption option, int round_size) {
  if (segment.freedom.refused.test(static_cast<std::size_t>(option))) {
    return false;
  }
  switch (option) {
    case ActivationOption::kCompress:
      return segment.coding.has_value();
    case ActivationOption::kRecompute:
    case ActivationOption::kRecomputeOffloaded:
      return segment.freedom.recompute == RecomputeScope::kInRounds ||
             (segment.freedom.recompute == RecomputeScope::kAlone && round_size == 1);
    default:
      return true;
  }
}

inline bool runs_again(ActivationOption option) {
  return option == ActivationOption::kRecompute || option == ActivationOption::kRecomputeOffloaded;
}

}  // namespace hydra
