// A lower bound for pipelines of a graph with too many closed sets for an exact search.
//
// Boxes hold the closed sets other than the empty one and the whole graph: a box has all that contain `inside` and miss
// `outside`. For a box, minimum cuts give lines with crossing >= least - price * (compute time of the set) for all of
// its sets (Lagrange's relaxation). If the graph has few enough closed sets, each is a box of its own.
//
// The plane of compute time and parameter bytes before a cut is divided into cells. The relaxed problem has a cut for
// each cell: its sums are intervals around the sums of all sets in the cell, and its crossing is the least that the
// boxes allow there. A cell may follow itself, and each that is not below it in one of the two sums. Cells lie in an
// order in which each comes before those that may follow it: a cell's two halves take its place, the lower one first.
//
// Proof that its best chain is a bound. Take a plan of the problem, and replace every closed set by its cell. The sums
// of nested sets ascend, so the cells may follow each other in this order. Each sum of a stage is a difference of two
// closed sets' sums, so it is at least the low end of one cell less the high end of the other; each crossing is at
// least that of its cell. A stage's time, transfers and memory do not fall when sums and crossings rise. So the relaxed
// chain is allowed, with the same replicas and at most the plan's value. On two levels the same holds for the inner
// pipelines first: the relaxed inner value is at most the true one, which takes the place of C.
//
// On one level, a cell that no chain within a limit has is dropped: the cells that are left are a relaxation of all
// plans within the limit. On two, the inner pipelines need all cells. Cells are halved, and their boxes divided at a
// node: the sets with the node, and those without it. On one level cut_reach.h is used, which loses less than the
// chains of cut_chain.h.
//
// One thread uses an object. Work is counted, not timed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/plan/cuts/cut_family.h"
#include "csrc/plan/cuts/cut_flow.h"

namespace hydra {

class CutRelaxation {
 public:
  /// Begins with one cell. `sets` are all closed sets of the graph, if they are known.
  CutRelaxation(const ProfileGraph& graph, const PipelineTerms& terms, const std::optional<std::vector<NodeSet>>& sets);

  /// Divides the largest boxes until there are `boxes`.
  void divide(std::size_t boxes);
  /// Divides the boxes that cells with chains within `limit` owe their crossing and the ends of their sums to, until
  /// there are `boxes`. Returns whether there was one.
  bool refine(double limit, std::size_t boxes);
  /// On one level, drops the cells, and the parts of cells, without chains within `limit`.
  void narrow(double limit);
  /// Halves the cells with chains within `limit`, until there are `cells`. Returns whether there was one.
  bool halve(double limit, std::size_t cells);
  /// The number of cells that chains may use. 0 if no plan with a cut is within the last limit.
  std::size_t cells() const noexcept { return cells_.size(); }
  /// Returns a bound of at most `known`, not lower than `bound`, to `precision` relative to it. `known` is at most the
  /// limit of the last call of narrow.
  double bound(double bound, double known, double precision);

  /// Up to `most` closed sets in cells that chains may use, those with the least crossing in each cell: of all sets if
  /// they are known, else of those that minimum cuts have found.
  std::vector<NodeSet> candidates(std::size_t most) const;
  /// The number of closed sets in cells that chains may use, if all are known.
  std::optional<std::size_t> sets() const;
  /// Steps so far: a measure of work.
  std::int64_t work() const noexcept { return work_; }

 private:
  struct Line {
    double price;
    double least;
  };
  /// The most of a sum that free nodes have within a compute time: a concave line through these points.
  struct Yield {
    std::vector<double> times;
    std::vector<double> amounts;
    double most(double time) const noexcept;
  };
  struct Box {
    NodeSet inside;
    NodeSet outside;
    std::vector<int> free;
    Interval compute;
    Interval parameters;
    Interval activations;
    Yield parameter_yield;
    Yield activation_yield;
    std::vector<Line> lines;
  };
  /// A closed set and its sums.
  struct Point {
    NodeSet set;
    double compute = 0;
    double parameters = 0;
    double activations = 0;
    double crossing = 0;
  };
  /// Boxes that have the least crossing, and the ends of the parameter bytes, in a cell.
  struct Owners {
    std::size_t crossing = 0;
    std::size_t low = 0;
    std::size_t high = 0;
  };
  struct Cell {
    Interval compute;
    Interval parameters;
    std::vector<std::size_t> points;  // if all closed sets are known
  };
  struct Relaxed {
    std::vector<Cut> cuts;  // of the cells, between those of the empty set and the whole graph
    std::vector<Owners> owners;
    CutOrder order{0};
  };

  Point point(NodeSet set) const;
  void add_boxes();
  void add_box(NodeSet inside, NodeSet outside);
  void draw_lines(Box& box, const NodeSet& widest);
  Yield yield(const Box& box, double ProfileNode::* amount) const;
  int divider(const Box& box);
  void divide_box(std::size_t index);
  bool add(const Box& box, std::size_t index, const Cell& cell, Cut& cut, Owners& owners) const;
  void add(const Point& point, Cut& cut) const noexcept;
  Relaxed relaxed();
  StageTimes inner_times(const Relaxed& all, double limit);
  /// The compute times that closed sets of chains within the limit may have, for each cut.
  std::vector<Interval> usable(const Relaxed& all, double limit);
  bool halves(const Cell& cell, Cell& low, Cell& high) const;

  const ProfileGraph& graph_;
  const PipelineTerms& terms_;
  ProfileSums total_;
  std::vector<Box> boxes_;
  std::vector<Point> points_;  // all closed sets, or those that minimum cuts have found
  bool complete_ = false;      // points_ are all closed sets; there are no boxes then
  std::vector<Cell> cells_;
  std::int64_t work_ = 0;
};

}  // namespace hydra
