// The best chain of cuts: exact dynamic programming over cuts and machine counts, for one level of machines.
//
// A stage lies between two cuts. On r replicas, with C, W and A as the sums of its compute time, parameter bytes and
// activation bytes, and B as the bandwidth, it takes (C + 4 (r - 1) W / (B r)) / r. With transfers in the objective, a
// stage other than the first also takes at least 2 X / (B r), where X is the crossing of the cut before it, or of the
// cut after it unless that is the end. The value of a chain is that of its slowest stage. These are the costs of
// PipeDream's published optimizer (Harlap et al., 2018; msr-fiddle/pipedream, optimizer_graph_hierarchical.py). A stage
// with k machines in later stages fits if ceil(k / r) * (A + W) is within the memory cap.
//
// Sums are intervals, so that one cut can stand for many: a stage then takes at least what is computed from the low end
// of the cut after it and the high end of the cut before it. The best chain's value is then a lower bound for all
// chains of cuts that these stand for.
//
// The search asks for the machine counts that later stages can use, up to a limit of the value, for each cut from the
// last to the first. Counts are bits of a word, so a stage costs a few shifts. The limit is then halved. Sound pruning:
// a cut is dropped if its sums before it need more machines than remain, at one machine for each `limit` of compute.
//
// Milliseconds and bytes. Values, reentrant; the work depends on the arguments only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace hydra {

inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();
inline constexpr int kMostMachines = 1023;
inline constexpr double kSumRounding = 1e-12;  // relative to a sum over all nodes: sums that differ less may be equal
inline constexpr int kPairSteps = 8;           // that a pair of cuts counts as, as a measure of work

struct Interval {
  double low = 0;
  double high = 0;
};

/// Sums over all nodes before a cut.
struct Cut {
  Interval compute_ms;
  Interval activation_bytes;
  Interval parameter_bytes;
  double crossing_bytes = 0;
};

/// Which cut may follow which. A cut follows only cuts of smaller index, or itself.
class CutOrder {
 public:
  explicit CutOrder(std::size_t cuts) : cuts_(cuts), words_((cuts + 63) / 64), bits_(cuts * words_) {}

  std::size_t size() const noexcept { return cuts_; }
  void allow(std::size_t before, std::size_t after) noexcept {
    bits_[before * words_ + after / 64] |= std::uint64_t{1} << after % 64;
  }
  bool allows(std::size_t before, std::size_t after) const noexcept {
    return (bits_[before * words_ + after / 64] >> after % 64 & 1U) != 0;
  }
  /// Calls `visit(after)` in ascending order, from the cut itself on.
  template <typename Visit>
  void for_each_after(std::size_t before, const Visit& visit) const {
    for (std::size_t i = before / 64; i < words_; ++i) {
      for (std::uint64_t rest = bits_[before * words_ + i]; rest != 0; rest &= rest - 1) {
        visit(i * 64 + static_cast<std::size_t>(__builtin_ctzll(rest)));
      }
    }
  }

 private:
  std::size_t cuts_;
  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

struct ChainTerms {
  int machines = 1;
  double bytes_per_ms = 1;
  double memory_cap = kUnbounded;
  bool straight = false;         // one replica for each stage
  bool fewer = false;            // machines may stay unused
  bool transfers = false;        // in the objective
  double first_stage_share = 1;  // the all-reduce term of the first stage is divided by this
  double stage_machines = 1;     // inside one replica: a stage takes at least its compute divided by this
};

struct StageSums {
  double compute_ms = 0;
  double activation_bytes = 0;
  double parameter_bytes = 0;
};

/// Milliseconds of a stage, in place of its compute, for each pair of cuts.
using StageTimes = std::vector<double>;
inline const StageTimes kNoStageTimes;

struct CutChain {
  std::vector<std::size_t> cuts;  // from the first to the last one
  std::vector<int> replicas;      // one fewer than cuts
};

/// The first cut is before all nodes, the last one behind them. Refers to its arguments, which have to outlive it.
class CutChains {
 public:
  /// `times` is empty, or has one time for each pair of cuts: [before * cuts + after].
  CutChains(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms,
            const StageTimes& times = kNoStageTimes);

  /// A chain with a value of at most `limit`, or nothing if there is none.
  std::optional<CutChain> within(double limit) const;
  /// Whether a chain of cuts within the limit has this cut, for each cut; yes for some others if memory has a cap.
  std::vector<bool> usable(double limit) const;
  double value(const CutChain& chain) const noexcept;
  /// A value that every chain meets.
  double ceiling() const noexcept;
  /// A value that no chain beats.
  double floor() const noexcept;

 private:
  template <std::size_t Bits>
  class Search;

  /// Calls `visit(search)` with a search of as many bits as the machines need.
  template <typename Visit>
  auto searched(double limit, const Visit& visit) const;
  StageSums sums(std::size_t before, std::size_t after) const noexcept;
  double transfer_ms(std::size_t before, std::size_t after) const noexcept;
  double reduce_ms(std::size_t before, double parameter_bytes) const noexcept;

  const std::vector<Cut>& cuts_;
  const CutOrder& order_;
  const ChainTerms& terms_;
  const StageTimes& times_;
};

struct BestChain {
  std::optional<CutChain> chain;  // nothing if no chain is allowed, or none beats the given value
  double value = kUnbounded;
  double bound = 0;  // no chain has a smaller value
  int searches = 0;
};

/// Halves the distance between bound and value until it is below `precision`, relative to the value. `bound` has to be
/// a bound already. Chains of at least `known` are not looked for; the result's bound is then at most `known`.
BestChain best_chain(const CutChains& chains, double bound, double known, double precision);

/// The best value of the chains between each pair of cuts, with all machines of `inner` used: [before * cuts + after].
/// Infinity where there is none, or none that a chain of `outer` within `limit` could have as a stage: that stage's
/// compute, all-reduce term and the machines that the rest needs are known from its ends.
StageTimes best_times(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& inner,
                      const ChainTerms& outer, double limit);

}  // namespace hydra
