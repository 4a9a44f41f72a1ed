// A lower bound for pipelines of a graph with too many closed sets for an exact search.
//
// Boxes hold the closed sets other than the empty one and the whole graph: a box has all that contain `inside` and miss
// `outside`. For a box, minimum cuts give lines with crossing >= least - price * (compute time of the set) for all of
// its sets (Lagrange's relaxation). If the graph has few enough closed sets, each is a box of its own.
//
// The plane of compute time and parameter bytes before a cut is divided into cells. The relaxed problem has a cut for
// each cell: its sums are intervals around the sums of all sets in the cell, and its crossing is the least that the
// boxes allow there. A cell may follow itself, and each that is not below it in one of the two sums.
//
// Proof that its best chain is a bound. Take a plan of the problem, and replace every closed set by its cell. The sums
// of nested sets ascend, so the cells may follow each other in this order. Each sum of a stage is a difference of two
// closed sets' sums, so it is at least the low end of one cell less the high end of the other; each crossing is at
// least that of its cell. A stage's time, transfers and memory do not fall when sums and crossings rise. So the relaxed
// chain is allowed, with the same replicas and at most the plan's value. On two levels the same holds for the inner
// pipelines first: the relaxed inner value is at most the true one, which takes the place of C.
//
// A cell that no chain within a limit has is dropped: the cells that are left are a relaxation of all plans within the
// limit. They are divided into finer ones, and their boxes into smaller ones, at a node: the sets with the node, and
// those without it.
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
  /// Divides the boxes that the cells owe their crossing and the ends of their sums to, until there are `boxes`.
  /// Returns whether there was one.
  bool refine(std::size_t boxes);
  /// Halves the cells in both directions, and drops those without chains within `limit`.
  void narrow(double limit);
  /// The number of cells that chains may use. 0 if no plan is within the last limit.
  std::size_t cells() const { return relaxed().cuts.size() - 2; }
  /// Returns a bound of at most `known`, not lower than `bound`, to `precision` relative to it. `known` is at most the
  /// limit of the last call of narrow.
  double bound(double bound, double known, double precision) const;

  /// Closed sets in cells that chains may use: all of them if the graph's are known, else those that minimum cuts have
  /// found, some of them twice.
  std::vector<NodeSet> candidates() const;
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
  struct Relaxed {
    std::vector<Cut> cuts;
    std::vector<Owners> owners;
    std::vector<std::size_t> cells;  // of all cuts but the first and the last
    CutOrder order{0};
  };
  class CellCuts;

  Point point(NodeSet set) const;
  void add_boxes();
  void add_box(NodeSet inside, NodeSet outside);
  void draw_lines(Box& box, const NodeSet& widest);
  Yield yield(const Box& box, double ProfileNode::* amount) const;
  int divider(const Box& box) const;
  void divide_box(std::size_t index);
  std::size_t step(double amount, double total) const noexcept;
  bool is_open(const Point& point) const noexcept;
  Relaxed relaxed() const;
  StageTimes stage_times(const Relaxed& all, double limit) const;

  const ProfileGraph& graph_;
  const PipelineTerms& terms_;
  ProfileSums total_;
  std::vector<Box> boxes_;
  std::vector<Point> points_;  // all closed sets, or those that minimum cuts have found
  bool complete_ = false;      // points_ are all closed sets; there are no boxes then
  std::size_t side_ = 1;       // cells in one direction
  std::vector<char> open_;     // for each cell: a chain may use it
  std::int64_t work_ = 0;
};

}  // namespace hydra
