// The cheapest options of a chain's segments for weighted seconds, by dynamic programming over kept bytes: kept bytes
// of the segments before one are all that memory depends on.
//
// Kept bytes are on a grid, rounded up, so what is found fits. Ownership: refers to the problem and the setting, which
// have to outlive it. Units are bytes and seconds. Threads: any; constant once it is made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "csrc/plan/activation_plan.h"

namespace hydra {

using OptionChain = std::vector<ActivationOption>;

inline constexpr double kNoSeconds = std::numeric_limits<double>::infinity();  // of what does not fit

/// What one second of each counts.
struct LaneWeights {
  double compute = 1;
  double lanes = 1;
};

/// Which options a candidate may use, where the segment allows another one too.
struct OptionSet {
  bool offloads = true;    // and compresses
  bool recomputes = true;  // from inputs that stay
  bool recomputes_offloaded = true;

  bool has(ActivationOption option) const {
    switch (option) {
      case ActivationOption::kKeep:
        return true;
      case ActivationOption::kRecompute:
        return recomputes;
      case ActivationOption::kRecomputeOffloaded:
        return recomputes_offloaded;
      default:
        return offloads;
    }
  }
};

/// What candidates share.
struct TreatmentSetting {
  std::size_t cut = 0;
  int round_size = 1;
  Bytes stash_bytes = 0;
  Bytes reserved = 0;  // for weights that stay
};

class CheapestOptions {
 public:
  CheapestOptions(const ActivationProblem& problem, const TreatmentSetting& setting);

  /// The work of one call of find(), in simulated segments of one microbatch.
  static std::int64_t work(std::int64_t segments) { return segments * 128; }

  /// Null if no options fit.
  std::optional<OptionChain> find(const LaneWeights& weights, const OptionSet& set) const;

 private:
  static constexpr std::size_t kCells = 512;

  /// From k cells kept before the segment to k + cells, for k < end.
  struct Move {
    std::size_t cells;
    std::size_t end;
    double cost;
  };

  std::optional<Move> move_of(const ActivationSegment& segment, ActivationOption option, const LaneWeights& weights,
                              const OptionSet& set) const;
  Bytes needed_bytes_if_allowed(const ActivationSegment& segment, ActivationOption option) const;
  OptionChain options_to(std::size_t cell, const std::vector<std::vector<double>>& costs, const LaneWeights& weights,
                         const OptionSet& set) const;

  const ActivationProblem& problem_;
  const TreatmentSetting& setting_;
  const std::vector<ActivationSegment>& segments_;
  Bytes room_ = 0;  // for all else
  Bytes unit_ = 1;
};

}  // namespace hydra
