// The backward of a round: runs the graphs of several microbatches piece by piece, in an order that the caller chooses.
//
// A piece is the part of a microbatch's graph that its forward made between two marks. Nodes are numbered per thread in
// the order of creation, and autograd runs a graph in exactly the opposite order. So a microbatch's pieces, run from
// the last to the first, form every sum in the order in which one backward would. Each edge that leaves its piece is
// redirected to a sink. The gradient that a sink receives becomes a root of the piece that the edge led to. A sum to
// which several pieces add passes through the sinks of each, oldest part first.
//
// A parameter's gradient is accumulated in the order of microbatches. The pieces alone do not achieve this if several
// pieces of a microbatch use the parameter, or if microbatches took different paths. Then the gradient is held on the
// host, summed per microbatch, until its turn.
//
// A microbatch's last piece may run before the graphs of later microbatches exist, so that its saved tensors, the
// largest of all, are freed early. Of its gradients, those that can be undone are accumulated; the others are held
// until plan().
//
// Every graph can run only once: a piece's saved tensors are freed with it.
// Threads: one at a time, without the interpreter lock.
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

  /// Adds the graph of the next microbatch, which ends in `loss`. `marks`: the node numbers at which its pieces begin.
  void add(const at::Tensor& loss, std::vector<std::uint64_t> marks);
  /// The reason why these graphs cannot be run in pieces; empty if they can. If it is not empty, no other method may be
  /// called.
  const std::string& refusal() const noexcept { return refusal_; }
  /// Runs the last piece of the microbatch that was added last. Those of all earlier microbatches must have run. A
  /// gradient is accumulated now if the order of the sum allows it and `may_be_undone` returns true for its leaf.
  void run_last_piece(const std::function<bool(const at::Tensor&)>& may_be_undone);
  /// Sets the order after all graphs are added. `turns`: every piece once, a microbatch's last piece first.
  void plan(std::vector<Turn> turns);
  /// Runs `turns[turn]` unless it has run already, and accumulates the gradients that are due then. Called with 0, 1,
  /// and so on.
  void run(std::size_t turn);
  /// Whether a node runs a backward of its own, which accumulates gradients by itself.
  bool nested() const noexcept { return nested_; }
  /// The leaves that the graphs accumulate into, each once, when all graphs are added. Gradients that have been
  /// accumulated early do not count.
  std::vector<at::Tensor> leaves() const;
  /// For each leaf, the last turn that accumulates into it; -1 if none does. A node's own backward is not counted.
  std::vector<std::int64_t> last_turns(const std::vector<at::Tensor>& leaves) const;
  /// The number of leaves whose gradients are held, one gradient per microbatch.
  std::size_t held() const noexcept { return held_; }

 private:
  using Node = torch::autograd::Node;
  using Edge = torch::autograd::Edge;
  /// What an edge points at.
  using Input = std::pair<Node*, std::uint32_t>;

  class Sink;
  struct Arrived {
    Edge edge;
    at::Tensor gradient;  // may be undefined: the node runs all the same
  };
  struct Piece {
    std::vector<NodePtr> nodes;
    std::map<Input, NodePtr> sinks;  // each a Sink
    std::map<Input, Arrived> arrived;
  };
  struct Place {
    Node* node = nullptr;  // null: it has run, and its gradient for the leaf is held
    std::size_t edge = 0;
    std::size_t piece = 0;
  };
  struct Graph {
    std::vector<std::uint64_t> marks;
    std::vector<Piece> pieces;
    std::map<Input, std::vector<Place>> leaves;  // by leaf: the edges that lead to it
    std::map<Input, Arrived> held;
    std::size_t piece_of(const Node& node) const;
  };

  void walk(std::size_t microbatch, const at::Tensor& loss);
  /// The reason why an edge from `user` to `node` cannot be part of a microbatch's graph; empty if it can.
  std::string why_not(std::size_t microbatch, const Node& user, const Node& node, const Node& root) const;
  void redirect(Graph& graph, const Place& place);
  void run_piece(Graph& graph, std::size_t index);
  void hold_leaves();
  void hold(const Input& leaf, const std::vector<std::size_t>& due);
  std::map<Input, Arrived>& waiting_for(Graph& graph, const Input& input);

  std::vector<Turn> turns_;
  std::vector<Graph> graphs_;
  std::set<Input> unfinished_;  // leaves that get more gradients from a microbatch whose last piece has run
  std::set<Input> held_early_;
  std::unordered_map<const Node*, std::size_t> owners_;                    // by node: the microbatch
  std::map<std::size_t, std::vector<std::pair<std::size_t, Input>>> due_;  // by turn: microbatches and held leaves
  std::map<Input, std::size_t> latest_;                                    // by leaf: the last turn
  std::string refusal_;
  std::size_t held_ = 0;
  bool nested_ = false;
};

}  // namespace hydra
