// How much compute time stages can do: a relaxation of chains of cuts that loses less than their intervals.
//
// Cuts stand for many, with intervals as their sums (cut_chain.h). Between two cuts, CutChains counts the low end of
// one and the high end of the other, so every cut loses the width of its interval. Here, for each cut and count of
// machines in later stages, the least compute time before the cut is kept with which these stages can do the rest
// within the limit. A stage on r replicas does at most r * limit - 4 (r - 1) W / (B r), so only parameter bytes lose
// their widths.
//
// Proof: let a plan within the limit have a closed set P before a stage, and Q behind it. If Q's compute time is at
// least what is kept for its cut, P's is at least that less r * limit - 4 (r - 1) W / (B r), and at least its cut's low
// end. By induction, backwards, no closed set of the plan is below what is kept; so the empty set is not either.
//
// The same holds forwards for the most compute time before a cut that earlier stages can have done.
//
// Milliseconds and bytes. Values; one level of machines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/plan/cuts/cut_chain.h"

namespace hydra {

/// Refers to its arguments, which have to outlive it.
class CutReach {
 public:
  CutReach(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, double limit);

  /// Whether a chain within the limit may exist.
  bool is_possible() const noexcept;
  /// The compute times that closed sets of chains within the limit may have, for each cut. Empty intervals have their
  /// low end above the high one.
  std::vector<Interval> usable();
  /// Steps so far: a measure of work.
  std::int64_t work() const noexcept { return work_; }

 private:
  /// What a stage needs, whatever its replicas.
  struct Stage {
    double reduce = 0;
    double bytes = 0;
    int fewest = 1;
  };

  void summarize(std::size_t cut) noexcept;
  Stage stage(std::size_t before, std::size_t after) const noexcept;
  /// The most compute time that a stage can do.
  double gain(const Stage& stage, int replicas) const noexcept;
  bool fits(const Stage& stage, int replicas, int later) const noexcept;
  /// The fewest machines for this compute time.
  int machines_for(double compute) const noexcept;
  /// `room` has the machines for this stage and those after it.
  void extend_back(std::size_t before, std::size_t after, int room);
  void extend(std::size_t before, std::size_t after, std::vector<double>& most);

  const std::vector<Cut>& cuts_;
  const CutOrder& order_;
  const ChainTerms& terms_;
  double limit_;
  double slack_;  // milliseconds that rounding may cost
  std::size_t width_;
  std::vector<double> least_;   // for each cut, and each count of machines behind it; infinity if there is no chain
  std::vector<double> lowest_;  // of these, for each cut
  std::vector<int> fewest_;     // machines behind each cut with which there is a chain
  std::int64_t work_ = 0;
};

/// A lower bound for all chains: at least `bound`, at most `known`, to `precision` relative to it. Adds its steps to
/// `work`.
double reach_bound(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, double bound,
                   double known, double precision, std::int64_t& work);

}  // namespace hydra
