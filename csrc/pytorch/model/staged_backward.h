// The backward of a round: the graphs of several microbatches, run piece by piece in an order of the caller's.
//
// A piece is what one microbatch's forward made from one mark on up to the next. Nodes are numbered per thread in the
// order of their making, and autograd runs a graph in exactly the opposite order; so a microbatch's pieces, run from
// the last to the first, form every sum in the order in which one backward would. Each edge that leaves its piece is
// pointed at a sink; what a sink received becomes a root of the piece it was meant for. Sums that several pieces add
// to pass through the sinks of each, oldest part first.
//
// A parameter's gradient is accumulated in the order of microbatches. Where the pieces alone would not do that (a
// parameter that several pieces of a microbatch use, or microbatches that took other paths) its gradient is held,
// summed per microbatch, on the host, until its turn.
//
// A microbatch's last piece may be run before the others' graphs are there: its saved tensors, the largest of all, need
// not wait for them. Of its gradients those that can be undone are accumulated, the others held until plan().
//
// The graphs are spent: what a piece saved is freed with it. Threads: one at a time, without the interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/pytorch/model/graph_marks.h"

namespace hydra {

class StagedBackward {
 public:
  /// One piece of one microbatch.
  struct Turn {
    std::size_t microbatch = 0;
    std::size_t piece = 0;
  };

  StagedBackward() = default;
  StagedBackward(const StagedBackward&) = delete;
  StagedBackward& operator=(const StagedBackward&) = delete;

  /// The next microbatch's graph, behind `loss`; `marks` are the numbers at which its pieces begin.
  void add(const at::Tensor& loss, std::vector<std::uint64_t> marks);
  /// Why these graphs cannot be run in pieces; empty when they can. Else nothing more is to be called.
  const std::string& refusal() const noexcept { return refusal_; }
  /// Runs the last piece of the microbatch that was added last; of all those before it, it has been run. A gradient is
  /// accumulated now if the sums' order allows it and `may_be_undone` says so of its leaf.
  void run_last_piece(const std::function<bool(const at::Tensor&)>& may_be_undone);
  /// All are added. `turns` has every piece once, a microbatch's last piece first.
  void plan(std::vector<Turn> turns);
  /// Runs `turns[turn]` unless it has been run, and accumulates the gradients whose turn has come. Turns come in their
  /// order.
  void run(std::size_t turn);
  /// Whether a node runs a backward of its own, which accumulates gradients when it comes to it.
  bool nested() const noexcept { return nested_; }
  /// What the graphs accumulate into, each once, when all are added. What has been accumulated early is not among it.
  std::vector<at::Tensor> leaves() const;
  /// By leaf, the last turn in which something is accumulated into it; -1 where nothing is. What a node's own backward
  /// accumulates is not known.
  std::vector<std::int64_t> last_turns(const std::vector<at::Tensor>& leaves) const;
  /// How many gradients are held at any time during the backward, one for each microbatch.
  std::size_t held() const noexcept { return held_; }

 private:
  using Node = torch::autograd::Node;
  using Edge = torch::autograd::Edge;
  /// What an edge points at.
  using Input = std::pair<Node*, std::uint32_t>;

  class Sink;
  struct Arrived {
    Edge edge;
    at::Tensor gradient;  // undefined: the node runs all the same
  };
  struct Piece {
    std::vector<NodePtr> nodes;
    std::map<Input, NodePtr> sinks;  // each a Sink
    std::map<Input, Arrived> arrived;
  };
  struct Place {
    Node* node = nullptr;  // null: it has been run, and what it gave to the leaf is held
    std::size_t edge = 0;
    std::size_t piece = 0;
  };
  struct Graph {
    std::vector<std::uint64_t> marks;
    std::vector<Piece> pieces;
    std::map<Input, std::vector<Place>> leaves;  // what accumulates into them
    std::map<Input, Arrived> held;
    std::size_t piece_of(const Node& node) const;
  };

  void walk(std::size_t microbatch, const at::Tensor& loss);
  /// Empty, or why an edge from `user` to `node` cannot be part of a microbatch's graph.
  std::string why_not(std::size_t microbatch, const Node& user, const Node& node, const Node& root) const;
  void redirect(Graph& graph, const Place& place);
  void run_piece(Graph& graph, std::size_t index);
  void hold_leaves();
  void hold(const Input& leaf, const std::vector<std::size_t>& due);
  std::map<Input, Arrived>& waiting_for(Graph& graph, const Input& input);

  std::vector<Turn> turns_;
  std::vector<Graph> graphs_;
  std::set<Input> unfinished_;  // leaves that a microbatch whose last piece was run has more to give to
  std::set<Input> held_early_;
  std::unordered_map<const Node*, std::size_t> owners_;                    // microbatches, by node
  std::map<std::size_t, std::vector<std::pair<std::size_t, Input>>> due_;  // by turn: held leaves of microbatches
  std::map<Input, std::size_t> latest_;                                    // turns, by leaf
  std::string refusal_;
  std::size_t held_ = 0;
  bool nested_ = false;
};

}  // namespace hydra
