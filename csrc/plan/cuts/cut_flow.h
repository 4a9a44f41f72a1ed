// The least crossing of the closed sets between two closed sets, with a price on their nodes, as a minimum cut.
//
// The source's side is the closed set. An infinite arc from each node to its predecessors closes it. A node with one
// successor has an arc of its activation bytes to it; a node with several has that arc to a node of its own, from which
// infinite arcs lead to the successors, so that it pays once. A positive price is an arc to the sink, a negative one an
// arc from the source. Capacities are integers, rounded so that the least value is a lower bound for every set.
//
// Not reentrant: one thread uses an object.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/plan/cuts/profile_graph.h"

namespace hydra {

class CutFlow {
 public:
  struct Least {
    NodeSet set;       // one with the least value, but for rounding
    double price = 0;  // the given one, made smaller if its capacities were too large for integers
    double value = 0;  // at most crossing + price * (weight of the set) of every set
  };

  /// The sets contain `inside`, which is closed, and no node of `outside`, which has all successors of its nodes.
  CutFlow(const ProfileGraph& graph, const NodeSet& inside, const NodeSet& outside);

  Least least(const std::vector<double>& weights, double price);
  /// Arcs visited so far: a measure of work.
  std::int64_t work() const noexcept { return work_; }

 private:
  struct Arc {
    int to;
    std::int64_t capacity;
  };

  int vertex();
  void connect(int from, int to, std::int64_t capacity, std::int64_t back);
  void add_crossing(int node, const NodeSet& inside, const NodeSet& outside);
  bool find_levels();
  std::int64_t push(int from, std::int64_t most);
  std::int64_t flow();

  const ProfileGraph& graph_;
  NodeSet inside_;
  double scale_ = 1;
  std::int64_t fixed_ = 0;     // crossing that all sets have
  std::vector<int> free_;      // nodes that a set may have or not
  std::vector<int> vertices_;  // for each node of the graph; -1 for nodes that are not free
  std::vector<Arc> arcs_;      // each before its reverse; first those from the source and to the sink of each free node
  std::vector<std::int64_t> capacities_;
  std::vector<std::vector<std::size_t>> out_;
  std::vector<int> level_;
  std::vector<std::size_t> next_;
  std::int64_t work_ = 0;
};

}  // namespace hydra
