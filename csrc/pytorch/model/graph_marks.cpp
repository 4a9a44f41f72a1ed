#include "csrc/pytorch/model/graph_marks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <unordered_set>

#include "csrc/base/errors.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

namespace autograd = torch::autograd;

/// Tells the model that backward has reached a site. It owns no tensor and no node, which would keep the graph alive.
class SiteReached final : public autograd::FunctionPreHook {
 public:
  SiteReached(std::weak_ptr<PagedModel> model, BlockList blocks, std::shared_ptr<const void> life)
      : model_(std::move(model)), blocks_(std::move(blocks)), life_(std::move(life)) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    const std::shared_ptr<PagedModel> model = blocks_.empty() ? nullptr : model_.lock();
    if (model) {
      const ReleaseGilIfHeld released;
      try {
        model->rounds().arrive_backward(blocks_);
      } catch (const Error&) {
        rethrow_for_torch(model->arrivals().timeline().explain());
      }
    }
    return gradients;
  }

 private:
  std::weak_ptr<PagedModel> model_;
  BlockList blocks_;
  std::shared_ptr<const void> life_;
};

/// Visits every node behind `roots` once, until `visit` returns false.
template <class Visit>
void walk(const std::vector<at::Tensor>& roots, const Visit& visit) {
  std::vector<autograd::Node*> stack;
  for (const at::Tensor& root : roots) {
    if (root.defined() && root.requires_grad()) {
      stack.push_back(autograd::impl::gradient_edge(root).function.get());
    }
  }
  std::unordered_set<const autograd::Node*> visited;
  while (!stack.empty()) {
    autograd::Node* node = stack.back();
    stack.pop_back();
    if (node == nullptr || !visited.insert(node).second) {
      continue;
    }
    if (!visit(node)) {
      return;
    }
    for (const autograd::Edge& edge : node->next_edges()) {
      stack.push_back(edge.function.get());
    }
  }
}

}  // namespace

std::weak_ptr<const void> GraphMarks::mark(const std::vector<at::Tensor>& outputs, const BlockList& blocks,
                                           const std::shared_ptr<PagedModel>& model) {
  std::unordered_set<autograd::Node*> seen;
  const auto life = std::make_shared<const char>();
  const std::lock_guard lock(mutex_);
  if (nodes_.size() >= prune_at_) {  // forwards without a backward leave expired nodes
    std::erase_if(nodes_, [](const auto& known) { return known.expired(); });
    prune_at_ = 2 * nodes_.size() + kPruneAtLeast;
  }
  for (const at::Tensor& output : outputs) {
    const NodePtr node = output.grad_fn();
    if (!node || (outputs.size() > 1 && !seen.insert(node.get()).second)) {
      continue;
    }
    nodes_.emplace_back(WeakNodePtr(node));
    node->add_pre_hook(std::make_unique<SiteReached>(model, blocks, life));
  }
  return life;
}

std::vector<NodePtr> GraphMarks::alive() {
  std::vector<NodePtr> nodes;
  const std::lock_guard lock(mutex_);
  std::erase_if(nodes_, [&](const auto& known) {
    NodePtr node = known.lock();
    if (!node) {
      return true;
    }
    nodes.push_back(std::move(node));
    return false;
  });
  return nodes;
}

std::vector<std::shared_ptr<PagedModel>> reached_models(const std::vector<at::Tensor>& roots,
                                                        const std::vector<std::shared_ptr<PagedModel>>& models) {
  std::unordered_map<const autograd::Node*, std::size_t> marked;
  std::vector<std::vector<NodePtr>> alive;
  for (std::size_t i = 0; i < models.size(); ++i) {
    alive.push_back(models[i]->window().marks().alive());
    for (const auto& node : alive.back()) {
      marked.emplace(node.get(), i);
    }
  }
  std::vector<std::shared_ptr<PagedModel>> reached;
  const auto reach = [&](const std::shared_ptr<PagedModel>& model) {
    if (std::find(models.begin(), models.end(), model) != models.end() &&
        std::find(reached.begin(), reached.end(), model) == reached.end()) {
      reached.push_back(model);
    }
  };
  walk(roots, [&](autograd::Node* node) {
    if (const auto found = marked.find(node); found != marked.end()) {
      reach(models[found->second]);
    }
    if (const auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node)) {
      if (const Page* page = page_of(leaf->variable)) {
        reach(page->owner.lock());
      }
    }
    return reached.size() < models.size();
  });
  return reached;
}

std::vector<bool> reached_leaves(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& leaves) {
  std::unordered_set<const at::TensorImpl*> found;
  walk(roots, [&](autograd::Node* node) {
    if (const auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node)) {
      found.insert(leaf->variable.unsafeGetTensorImpl());
    }
    return true;
  });
  std::vector<bool> reached;
  for (const at::Tensor& leaf : leaves) {
    reached.push_back(found.contains(leaf.unsafeGetTensorImpl()));
  }
  return reached;
}

std::vector<at::Tensor> other_leaves(const std::vector<at::Tensor>& roots) {
  std::vector<at::Tensor> found;
  walk(roots, [&](autograd::Node* node) {
    const auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node);
    if (leaf != nullptr && page_of(leaf->variable) == nullptr) {
      found.push_back(leaf->variable);
    }
    return true;
  });
  return found;
}

}  // namespace hydra
