// The cheapest options of a chain's segments for weighted seconds, by dynamic programming over kept bytes: kept bytes
// of the segments before one are all that memory depends on. What several segments keep counts once, as far as it was
// saved first by one of those until then. So what is found fits where no segment keeps the inputs of a second forward.
//
// Kept bytes are on a grid, rounded up. Ownership: refers to the problem and the setting, which have to outlive it.
// Units are bytes and seconds. Threads: any; constant once it is made.
#pragma once

#include <algorithm>
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

  /// From cells kept before the segment to cells kept with it.
  struct Move {
    std::size_t cells;  // that it keeps by itself
    std::size_t fresh;  // of these, that no segment before it has saved
    std::size_t most;   // that all until it have saved first
    std::size_t end;    // of cells before it, if it shares none
    std::size_t limit;  // of cells with it
    double cost;

    std::size_t to(std::size_t before) const { return std::min(before + cells, std::max(before + fresh, most)); }
    bool fits(std::size_t before) const { return (before < end || to(before) <= limit) && to(before) <= kCells; }
  };

  std::optional<Move> move_of(std::size_t i, ActivationOption option, const LaneWeights& weights,
                              const OptionSet& set) const;
  std::size_t cells_of(Bytes bytes) const;  // rounded up
  OptionChain options_to(std::size_t cell, const std::vector<std::vector<double>>& costs, const LaneWeights& weights,
                         const OptionSet& set) const;

  const ActivationProblem& problem_;
  const TreatmentSetting& setting_;
  const std::vector<ActivationSegment>& segments_;
  Bytes room_ = 0;  // for all else
  Bytes unit_ = 1;
  std::vector<Bytes> most_kept_;  // until each segment, of a round
};

}  // namespace hydra
