#include "csrc/pytorch/model/staged_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>

#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/parameters/page.h"

namespace hydra {

namespace autograd = torch::autograd;

namespace {

constexpr std::uint64_t kLeaf = std::numeric_limits<std::uint64_t>::max();  // torch's number for leaves

/// Makes nodes behind torch's pointer type: intrusive since 2.13, shared before.
template <class Pointer>
struct Maker;
template <class T>
struct Maker<c10::intrusive_ptr<T>> {
  template <class Made>
  static c10::intrusive_ptr<T> make(autograd::Edge edge) {
    return c10::make_intrusive<Made>(std::move(edge));
  }
};
template <class T>
struct Maker<std::shared_ptr<T>> {
  template <class Made>
  static std::shared_ptr<T> make(autograd::Edge edge) {
    return std::make_shared<Made>(std::move(edge));
  }
};

bool is_leaf(const autograd::Node& node) { return node.sequence_nr() == kLeaf; }

void execute(const autograd::edge_list& roots, const autograd::variable_list& gradients) {
  autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                                 /*accumulate_grad=*/true, /*outputs=*/{});
}

/// Whether the leaf is a tensor of the host, so that its gradient is there. Copies would cost memory, and would close
/// the gaps between a sparse gradient's values, with which torch adds in another order.
bool is_on_host(const autograd::Node& leaf) {
  const auto* node = dynamic_cast<const autograd::AccumulateGrad*>(&leaf);
  return node != nullptr && node->variable.is_cpu() && page_of(node->variable) == nullptr;
}

/// Copies a held sum to the host: on the device, one sum for each microbatch would take too much memory.
at::Tensor to_host(at::Tensor gradient, const autograd::Node& leaf) {
  if (!gradient.defined() || is_on_host(leaf)) {
    return gradient;
  }
  const HostScope on_the_host;
  return gradient.to(gradient.options().device(at::kCPU), false, /*copy=*/true);
}

at::Tensor from_host(at::Tensor gradient, const autograd::Node& leaf) {
  if (!gradient.defined() || is_on_host(leaf)) {
    return gradient;
  }
  const at::Device device = leaf.input_metadata(0).device();
  return gradient.to(gradient.options().device(device), false, /*copy=*/true);
}

}  // namespace

/// Receives the gradient that an edge would have brought to a node of another piece.
class StagedBackward::Sink final : public autograd::Node {
 public:
  explicit Sink(Edge instead_of) : Node(kLeaf, autograd::edge_list()), target(std::move(instead_of)) {
    input_metadata_.emplace_back(target.function->input_metadata(target.input_nr));
  }
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    received = std::move(gradients[0]);
    reached = true;
    return {};
  }

  Edge target;
  at::Tensor received;
  bool reached = false;
};

std::size_t StagedBackward::Graph::piece_of(const Node& node) const {
  const auto after = std::upper_bound(marks.begin(), marks.end(), node.sequence_nr());
  return after == marks.begin() ? 0 : static_cast<std::size_t>(after - marks.begin()) - 1;
}

void StagedBackward::add(const at::Tensor& loss, std::vector<std::uint64_t> marks) {
  Graph& graph = graphs_.emplace_back();
  graph.marks = std::move(marks);
  graph.pieces.resize(graph.marks.size());
  walk(graphs_.size() - 1, loss);
}

void StagedBackward::plan(std::vector<Turn> turns) {
  turns_ = std::move(turns);
  owners_.clear();
  hold_leaves();
}

std::string StagedBackward::why_not(std::size_t microbatch, const Node& user, const Node& node,
                                    const Node& root) const {
  const auto owner = owners_.find(&node);
  if (owner != owners_.end() && owner->second != microbatch) {
    return "microbatches " + std::to_string(owner->second) + " and " + std::to_string(microbatch) + " share " +
           node.name() + ", used by " + user.name();
  }
  if (node.thread_id() != root.thread_id()) {
    return node.name() + ", used by " + user.name() + ", was made outside fn";
  }
  if (node.sequence_nr() >= user.sequence_nr()) {
    return node.name() + " is younger than its user " + user.name();
  }
  return {};
}

void StagedBackward::walk(std::size_t microbatch, const at::Tensor& loss) {
  Graph& graph = graphs_[microbatch];
  const Edge root = autograd::impl::gradient_edge(loss);
  std::vector<NodePtr> unseen{root.function};
  owners_[root.function.get()] = microbatch;
  if (is_leaf(*root.function)) {
    refusal_ = "the loss of microbatch " + std::to_string(microbatch) + " is a parameter";
    return;
  }
  graph.pieces[graph.piece_of(*root.function)].arrived[{root.function.get(), root.input_nr}] = {root,
                                                                                                at::ones_like(loss)};
  while (!unseen.empty()) {
    const NodePtr user = std::move(unseen.back());
    unseen.pop_back();
    const std::size_t piece = graph.piece_of(*user);
    nested_ = nested_ || user->name() == "CheckpointFunctionBackward";
    for (std::size_t i = 0; i < user->num_outputs(); ++i) {
      const Edge edge = user->next_edge(i);
      if (!edge.is_valid()) {
        continue;
      }
      Node& node = *edge.function;
      if (is_leaf(node)) {
        graph.leaves[{&node, edge.input_nr}].push_back({user.get(), i, piece});
        continue;
      }
      refusal_ = why_not(microbatch, *user, node, *root.function);
      if (!refusal_.empty()) {
        return;
      }
      if (owners_.emplace(&node, microbatch).second) {
        unseen.push_back(edge.function);
      }
      if (graph.piece_of(node) != piece) {
        redirect(graph, {user.get(), i, piece});
      }
    }
    graph.pieces[piece].nodes.push_back(user);
  }
}

void StagedBackward::redirect(Graph& graph, const Place& place) {
  const Edge edge = place.node->next_edge(place.edge);
  auto& sink = graph.pieces[place.piece].sinks[{edge.function.get(), edge.input_nr}];
  if (!sink) {
    sink = Maker<NodePtr>::make<Sink>(edge);
  }
  place.node->next_edges()[place.edge] = Edge(sink, 0);
  // The node of an in-place operation on a view keeps a second list of its edges; only the first edge is its own.
  if (auto* slices = dynamic_cast<autograd::CopySlices*>(place.node); slices != nullptr && place.edge > 0) {
    slices->fn->next_edges()[place.edge] = Edge(sink, 0);
  }
}

// ---- leaves -----------------------------------------------------------------------------------

void StagedBackward::hold_leaves() {
  std::vector<std::vector<std::size_t>> when(graphs_.size());  // by microbatch and piece: the turn
  for (std::size_t i = 0; i < graphs_.size(); ++i) {
    when[i].resize(graphs_[i].pieces.size());
  }
  for (std::size_t turn = 0; turn < turns_.size(); ++turn) {
    when[turns_[turn].microbatch][turns_[turn].piece] = turn;
  }
  struct Uses {
    std::vector<std::size_t> due;  // by microbatch: the turn after which its sum and all earlier ones are complete
    std::size_t latest = 0;
    bool in_order = true;
  };
  std::map<Input, Uses> leaves;
  for (std::size_t i = 0; i < graphs_.size(); ++i) {
    for (const auto& [leaf, places] : graphs_[i].leaves) {
      const auto [first, last] = std::minmax_element(places.begin(), places.end(),
                                                     [](const Place& a, const Place& b) { return a.piece < b.piece; });
      Uses& uses = leaves[leaf];
      const std::size_t turn = when[i][first->piece];
      uses.in_order = uses.in_order && first->piece == last->piece && turn >= uses.latest;
      uses.latest = std::max(uses.latest, turn);
      uses.due.resize(i, uses.latest);
      uses.due.push_back(uses.latest);
    }
  }
  for (const auto& [leaf, uses] : leaves) {
    latest_[leaf] = uses.latest;
    if (!uses.in_order || held_early_.contains(leaf)) {
      hold(leaf, uses.due);
    }
  }
}

std::vector<at::Tensor> StagedBackward::leaves() const {
  std::set<const Node*> known;
  std::vector<at::Tensor> found;
  for (const Graph& graph : graphs_) {
    for (const auto& [leaf, places] : graph.leaves) {
      const auto* node = dynamic_cast<const autograd::AccumulateGrad*>(leaf.first);
      if (node != nullptr && known.insert(node).second) {
        found.push_back(node->variable);
      }
    }
  }
  return found;
}

std::vector<std::int64_t> StagedBackward::last_turns(const std::vector<at::Tensor>& leaves) const {
  std::vector<std::int64_t> turns;
  for (const at::Tensor& leaf : leaves) {
    const auto node = autograd::impl::try_get_grad_accumulator(leaf);
    const auto known = node ? latest_.find({node.get(), 0}) : latest_.end();
    turns.push_back(known == latest_.end() ? -1 : static_cast<std::int64_t>(known->second));
  }
  return turns;
}

void StagedBackward::hold(const Input& leaf, const std::vector<std::size_t>& due) {
  ++held_;
  for (std::size_t i = 0; i < due.size(); ++i) {
    const auto places = graphs_[i].leaves.find(leaf);
    if (places == graphs_[i].leaves.end()) {
      continue;
    }
    for (const Place& place : places->second) {
      if (place.node != nullptr) {
        redirect(graphs_[i], place);
      }
    }
    due_[due[i]].emplace_back(i, leaf);
  }
}

std::map<StagedBackward::Input, StagedBackward::Arrived>& StagedBackward::waiting_for(Graph& graph,
                                                                                      const Input& input) {
  return is_leaf(*input.first) ? graph.held : graph.pieces[graph.piece_of(*input.first)].arrived;
}

// ---- turns ------------------------------------------------------------------------------------

void StagedBackward::run_last_piece(const std::function<bool(const at::Tensor&)>& may_be_undone) {
  Graph& graph = graphs_.back();
  const std::size_t last = graph.pieces.size() - 1;
  const auto here = [last](const Place& place) { return place.piece == last; };
  for (auto known = graph.leaves.begin(); known != graph.leaves.end();) {
    const Input leaf = known->first;
    std::vector<Place>& places = known->second;
    const auto* node = dynamic_cast<const autograd::AccumulateGrad*>(leaf.first);
    if (!unfinished_.contains(leaf) && std::all_of(places.begin(), places.end(), here) && node != nullptr &&
        may_be_undone(node->variable)) {
      known = graph.leaves.erase(known);
      continue;
    }
    unfinished_.insert(leaf);
    for (Place& place : places) {
      if (here(place)) {
        redirect(graph, place);
        place.node = nullptr;
        held_early_.insert(leaf);
      }
    }
    ++known;
  }
  for (const NodePtr& node : graph.pieces[last].nodes) {
    owners_.erase(node.get());  // another node may get the same address
  }
  run_piece(graph, last);
}

void StagedBackward::run(std::size_t turn) {
  run_piece(graphs_[turns_[turn].microbatch], turns_[turn].piece);
  if (const auto due = due_.find(turn); due != due_.end()) {
    for (const auto& [microbatch, leaf] : due->second) {
      if (auto held = graphs_[microbatch].held.extract(leaf)) {
        at::Tensor gradient = from_host(std::move(held.mapped().gradient), *leaf.first);
        execute({held.mapped().edge}, {std::move(gradient)});
      }
    }
  }
}

void StagedBackward::run_piece(Graph& graph, std::size_t index) {
  Piece piece = std::exchange(graph.pieces[index], {});
  if (piece.arrived.empty()) {
    return;
  }
  autograd::edge_list roots;
  autograd::variable_list gradients;
  const auto add = [&](Edge edge, at::Tensor gradient) {
    roots.push_back(std::move(edge));
    gradients.push_back(std::move(gradient));
  };
  for (auto& [input, arrived] : piece.arrived) {
    add(std::move(arrived.edge), std::move(arrived.gradient));
  }
  piece.arrived.clear();
  for (const auto& [input, sink] : piece.sinks) {
    auto& waiting = waiting_for(graph, input);
    if (const auto before = waiting.find(input); before != waiting.end()) {
      add(Edge(sink, 0), is_leaf(*input.first) ? from_host(std::move(before->second.gradient), *input.first)
                                               : std::move(before->second.gradient));
      waiting.erase(before);
    }
  }
  execute(roots, gradients);
  for (const auto& [input, node] : piece.sinks) {
    if (auto& sink = static_cast<Sink&>(*node); sink.reached) {
      waiting_for(graph, input)[input] = {sink.target, is_leaf(*input.first)
                                                           ? to_host(std::move(sink.received), *input.first)
                                                           : std::move(sink.received)};
    }
  }
}

}  // namespace hydra
