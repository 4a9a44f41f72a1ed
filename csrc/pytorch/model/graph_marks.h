// Marks in the autograd graph. They tell which models a backward runs through, and when it reaches their blocks.
//
// The nodes that made a site's outputs are marked. A hook before such a node tells the model that backward has reached
// the site's blocks. The node is also remembered, weakly, to match a backward with the models whose graphs it walks. So
// a backward of other models opens no window and is not charged.
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

/// torch's owning pointer to a node: intrusive since 2.13, shared before.
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
  /// Marks the nodes that made `outputs`. With empty `blocks` they are only remembered. The result expires with the
  /// last of them.
  std::weak_ptr<const void> mark(const std::vector<at::Tensor>& outputs, const std::vector<std::int32_t>& blocks,
                                 const std::shared_ptr<PagedModel>& model);
  /// Returns the marked nodes that are still alive.
  std::vector<NodePtr> alive();

 private:
  static constexpr std::size_t kPruneAtLeast = 1024;
  std::mutex mutex_;
  std::vector<WeakNodePtr> nodes_;
  std::size_t prune_at_ = kPruneAtLeast;
};

/// Returns those of `models` whose marked nodes or device parameters the graph of `roots` reaches. The walk ends as
/// soon as every model is found.
std::vector<std::shared_ptr<PagedModel>> reached_models(const std::vector<at::Tensor>& roots,
                                                        const std::vector<std::shared_ptr<PagedModel>>& models);

/// Returns, for each of these leaves, whether the graph of `roots` reaches it.
std::vector<bool> reached_leaves(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& leaves);

/// Returns the leaves that the graph of `roots` reaches, without device parameters.
std::vector<at::Tensor> other_leaves(const std::vector<at::Tensor>& roots);

}  // namespace hydra
