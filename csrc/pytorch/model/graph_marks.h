// Which models a backward will run through, and where in it.
//
// What a site returns is marked in the graph: a hook before its node tells the model that backward has reached the
// site's blocks, and the node is remembered, weakly, so that a backward can be matched with the models whose graph
// it walks. Backwards of other models thus open no window and are not charged.
// Threads: any.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace hydra {

class PagedModel;

/// What torch holds nodes by: an intrusive pointer since 2.13, a shared pointer before.
using NodePtr = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

template <class Pointer>
struct WeakOf;
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <class T>
struct WeakOf<c10::intrusive_ptr<T>> {
  using type = c10::weak_intrusive_ptr<T>;
};
using WeakNodePtr = WeakOf<NodePtr>::type;

class GraphMarks {
 public:
  /// Marks the nodes that made `outputs`. `blocks` empty: remembered only. What is returned lives as long as they do.
  std::weak_ptr<const void> mark(const std::vector<at::Tensor>& outputs, const std::vector<std::int32_t>& blocks,
                                 const std::shared_ptr<PagedModel>& model);
  /// Nodes that are still alive.
  std::vector<NodePtr> alive();

 private:
  static constexpr std::size_t kPruneAtLeast = 1024;
  std::mutex mutex_;
  std::vector<WeakNodePtr> nodes_;
  std::size_t prune_at_ = kPruneAtLeast;
};

/// Those of `models` whose marked nodes or device parameters the graph of `roots` reaches. Walks the graph, and no
/// further than until every model has been found.
std::vector<std::shared_ptr<PagedModel>> reached_models(const std::vector<at::Tensor>& roots,
                                                        const std::vector<std::shared_ptr<PagedModel>>& models);

/// Which of these leaves the graph of `roots` reaches.
std::vector<bool> reached_leaves(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& leaves);

}  // namespace hydra
