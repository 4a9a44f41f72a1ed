// How much compute time the first stages can have done: a relaxation of chains of cuts that loses less than intervals.
//
// Cuts stand for many, with intervals as their sums (cut_chain.h). Between two cuts, CutChains counts the low end of
// one and the high end of the other, so every cut loses the width of its interval. Here, for each cut and count of
// machines, the most compute time is kept that a chain within the limit can have before the cut. From there, a stage on
// r replicas gets at most r * limit - 4 (r - 1) W / (B r) further, and not beyond the cut's high end. So only the
// parameter bytes lose their widths.
//
// Proof: let a plan within the limit have a closed set P before a stage, and Q behind it. If P's compute time is at
// most what is kept for its cut and machines, Q's is at most P's + r * limit - 4 (r - 1) W / (B r), and at most the
// high end. By induction every closed set of the plan is within what is kept; so the whole graph is reached.
//
// The same holds backwards for the least compute time before a cut, so that later stages can do the rest.
//
// Milliseconds and bytes. Values; one level of machines.
#pragma once

#include <cstddef>
#include <vector>

#include "csrc/plan/cuts/cut_chain.h"

namespace hydra {

/// Refers to its arguments, which have to outlive it.
class CutReach {
 public:
  CutReach(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, double limit);

  /// Whether a chain within the limit may exist.
  bool reaches_end() const noexcept;
  /// The compute times that closed sets of chains within the limit may have, for each cut. Empty intervals have their
  /// low end above the high one.
  std::vector<Interval> usable() const;

 private:
  /// What a stage needs, whatever its replicas.
  struct Stage {
    double reduce = 0;
    double bytes = 0;
    int fewest = 1;
  };

  Stage stage(std::size_t before, std::size_t after) const noexcept;
  bool fits(const Stage& stage, int replicas, int later) const noexcept;
  double* most(std::size_t cut) noexcept { return most_.data() + cut * (machines_ + 1); }
  const double* most(std::size_t cut) const noexcept { return most_.data() + cut * (machines_ + 1); }
  void extend(std::size_t before, std::size_t after);

  const std::vector<Cut>& cuts_;
  const CutOrder& order_;
  const ChainTerms& terms_;
  double limit_;
  std::size_t machines_;
  std::vector<double> most_;  // for each cut, and for each count of machines before it; -infinity if there is no chain
};

/// A lower bound for all chains: at least `bound`, at most `known`, to `precision` relative to it.
double reach_bound(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, double bound,
                   double known, double precision);

}  // namespace hydra
