// A model as a graph of layers, and the places where a pipeline may cut it.
//
//   node        a layer, numbered from 0 as the caller lists it
//   edge        the output of one node is an input of another
//   closed set  nodes together with all their predecessors. A cut has a closed set before it
//   crossing    the sum of activation bytes of a set's nodes that have an edge out of the set
//
// Times are milliseconds for one minibatch, sizes are bytes, both in doubles that are finite and not negative.
// Values, reentrant. Results do not depend on addresses or on time.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/plan/chain.h"

namespace hydra {

struct ProfileNode {
  double compute_ms = 0;  // forward and backward
  double activation_bytes = 0;
  double parameter_bytes = 0;
};

/// A set of a graph's nodes. Two sets that are compared or united belong to one graph.
class NodeSet {
 public:
  NodeSet() = default;
  explicit NodeSet(int nodes) : words_((static_cast<std::size_t>(nodes) + 63) / 64) {}

  bool has(int node) const noexcept { return (words_[word(node)] >> bit(node) & 1U) != 0; }
  void add(int node) noexcept { words_[word(node)] |= std::uint64_t{1} << bit(node); }
  void remove(int node) noexcept { words_[word(node)] &= ~(std::uint64_t{1} << bit(node)); }
  bool is_within(const NodeSet& other) const noexcept;
  bool meets(const NodeSet& other) const noexcept;
  int count() const noexcept;
  NodeSet& operator|=(const NodeSet& other) noexcept;
  NodeSet& operator&=(const NodeSet& other) noexcept;
  NodeSet& operator-=(const NodeSet& other) noexcept;
  bool operator==(const NodeSet&) const = default;
  const std::vector<std::uint64_t>& words() const noexcept { return words_; }

  /// Calls `visit(node)` for each node, in ascending order.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint64_t rest = words_[i]; rest != 0; rest &= rest - 1) {
        visit(static_cast<int>(i * 64) + std::countr_zero(rest));
      }
    }
  }

 private:
  static std::size_t word(int node) noexcept { return static_cast<std::size_t>(node) / 64; }
  static unsigned bit(int node) noexcept { return static_cast<unsigned>(node) % 64; }

  std::vector<std::uint64_t> words_;
};

/// Sums over the nodes of a set.
struct ProfileSums {
  double compute_ms = 0;
  double activation_bytes = 0;
  double parameter_bytes = 0;
};

class ProfileGraph {
 public:
  using Edge = std::pair<int, int>;

  /// Throws PlanError if there is no node, if a value is negative or not finite, if an edge names an unknown node, or
  /// if the edges form a cycle. Edges that are listed twice count once.
  ProfileGraph(std::vector<ProfileNode> nodes, const std::vector<Edge>& edges);

  int size() const noexcept { return static_cast<int>(nodes_.size()); }
  const ProfileNode& node(int index) const noexcept { return nodes_[static_cast<std::size_t>(index)]; }
  const std::vector<int>& predecessors(int node) const noexcept { return before_[static_cast<std::size_t>(node)]; }
  const std::vector<int>& successors(int node) const noexcept { return after_[static_cast<std::size_t>(node)]; }
  /// All nodes that have a path to the node, and the node.
  const NodeSet& ancestors(int node) const noexcept { return ancestors_[static_cast<std::size_t>(node)]; }
  /// All nodes that the node has a path to, and the node.
  const NodeSet& descendants(int node) const noexcept { return descendants_[static_cast<std::size_t>(node)]; }
  /// The nodes so that every edge leads forward. Ends one branch before it begins the next.
  const std::vector<int>& order() const noexcept { return order_; }

  ProfileSums sums(const NodeSet& set) const noexcept;
  double crossing_bytes(const NodeSet& set) const noexcept;
  /// Nodes outside a closed set that can be added one by one.
  std::vector<int> addable(const NodeSet& closed) const;
  /// Nodes of a closed set that can be removed one by one.
  std::vector<int> removable(const NodeSet& closed) const;
  /// All closed sets, the empty one and the whole graph included; those with fewer nodes come first. Returns nothing if
  /// there are more than `limit`, or if the search for them would take much memory, as in graphs that are very wide.
  std::optional<std::vector<NodeSet>> closed_sets(std::size_t limit) const;

 private:
  void sort_nodes();

  std::vector<ProfileNode> nodes_;
  std::vector<std::vector<int>> before_;
  std::vector<std::vector<int>> after_;
  std::vector<int> order_;
  std::vector<NodeSet> ancestors_;
  std::vector<NodeSet> descendants_;
};

/// Hashes a set by its nodes.
struct NodeSetHash {
  std::size_t operator()(const NodeSet& set) const noexcept;
};

}  // namespace hydra
