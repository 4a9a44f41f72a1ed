#include "csrc/pytorch/stash/saved_use.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace hydra {

namespace autograd = torch::autograd;
namespace py = pybind11;

namespace {

enum class Rule : std::uint8_t { kNone, kSigns, kShape, kMaxPool, kConvolution, kMatrices, kMatricesAndBias };

/// The rules of operators. kSigns applies to all tensors that an operator saves, kShape to its first argument, kMaxPool
/// to its first argument and its indices.
const std::unordered_map<std::string_view, Rule>& rules() {
  static const std::unordered_map<std::string_view, Rule> known{
      {"aten::convolution", Rule::kConvolution},
      {"aten::mm", Rule::kMatrices},
      {"aten::addmm", Rule::kMatricesAndBias},
      {"aten::relu", Rule::kSigns},
      {"aten::relu_", Rule::kSigns},
      {"aten::leaky_relu", Rule::kSigns},
      {"aten::leaky_relu_", Rule::kSigns},
      {"aten::max_pool2d_with_indices", Rule::kMaxPool},
      {"aten::max_pool3d_with_indices", Rule::kShape},
      {"aten::adaptive_max_pool2d", Rule::kShape},
      {"aten::adaptive_max_pool3d", Rule::kShape},
      {"aten::avg_pool2d", Rule::kShape},
      {"aten::avg_pool3d", Rule::kShape},
      {"aten::_adaptive_avg_pool2d", Rule::kShape},
      {"aten::_adaptive_avg_pool3d", Rule::kShape},
  };
  return known;
}

/// A running operator.
struct Followed {
  std::string_view name;
  Rule rule = Rule::kNone;
  at::Tensor first;  // the two arguments that the rule concerns, if any
  at::Tensor second;
  double touched_by_first = 0;  // if the second is the weight
  double touched_by_second = 0;
  std::size_t edge_of_first = 0;   // its index in the backward's node
  std::size_t edge_of_weight = 0;  // likewise, once the weight is known
  codec::PoolGeometry pool;
  GradientObserver observer;
};

struct Following {
  int depth = 0;
  at::CallbackHandle callback = 0;
  std::vector<Followed> running;
};

thread_local Following following;

at::Tensor tensor_at(c10::ArrayRef<const c10::IValue> inputs, std::size_t index) {
  return index < inputs.size() && inputs[index].isTensor() ? inputs[index].toTensor() : at::Tensor();
}

void read_convolution(Followed& op, c10::ArrayRef<const c10::IValue> inputs) {
  constexpr std::size_t kStride = 3;
  constexpr std::size_t kTransposed = 6;
  constexpr std::size_t kGroups = 8;
  op.first = tensor_at(inputs, 0);
  op.second = tensor_at(inputs, 1);
  if (!op.second.defined() || op.second.dim() < 2 || inputs.size() <= kGroups || !inputs[kStride].isIntList() ||
      !inputs[kTransposed].isBool() || !inputs[kGroups].isInt()) {
    op.rule = Rule::kNone;
    return;
  }
  const bool transposed = inputs[kTransposed].toBool();
  const std::int64_t outputs = transposed ? op.second.size(1) * inputs[kGroups].toInt() : op.second.size(0);
  op.touched_by_first =
      static_cast<double>(op.second.numel()) / static_cast<double>(std::max<std::int64_t>(outputs, 1));
  if (transposed) {  // inputs lie a stride apart in the output, so that fewer of the kernel's elements meet there
    const std::vector<std::int64_t> strides = inputs[kStride].toIntVector();
    for (std::int64_t dim = 2; dim < op.second.dim() && !strides.empty(); ++dim) {
      op.touched_by_first /= static_cast<double>(strides.size() == 1 ? strides[0] : strides.at(dim - 2));
    }
  }
}

void read_matrices(Followed& op, c10::ArrayRef<const c10::IValue> inputs, std::size_t first) {
  op.first = tensor_at(inputs, first);
  op.second = tensor_at(inputs, first + 1);
  op.edge_of_first = first;
  if (!op.first.defined() || !op.second.defined() || op.first.dim() != 2 || op.second.dim() != 2) {
    op.rule = Rule::kNone;
    return;
  }
  op.touched_by_first = op.touched_by_second = static_cast<double>(op.first.size(1));
}

void read_matrices_and_bias(Followed& op, c10::ArrayRef<const c10::IValue> inputs) {
  read_matrices(op, inputs, 1);
  if (inputs.at(4).toScalar().toDouble() != 1.0) {  // alpha, by which errors would be multiplied
    op.rule = Rule::kNone;
  }
}

std::array<std::int64_t, 2> pair_at(c10::ArrayRef<const c10::IValue> inputs, std::size_t index,
                                    std::array<std::int64_t, 2> unless_given) {
  const std::vector<std::int64_t> values = inputs.at(index).toIntVector();
  return values.empty() ? unless_given : std::array{values.front(), values.back()};
}

void read_max_pool(Followed& op, c10::ArrayRef<const c10::IValue> inputs) {
  op.first = tensor_at(inputs, 0);
  op.pool.kernel = pair_at(inputs, 1, {1, 1});
  op.pool.stride = pair_at(inputs, 2, op.pool.kernel);
  op.pool.padding = pair_at(inputs, 3, {0, 0});
  op.pool.dilation = pair_at(inputs, 4, {1, 1});
  op.pool.input_width = op.first.defined() && op.first.dim() > 0 ? op.first.size(-1) : 0;
}

void read(Followed& op, const at::RecordFunction& function) {
  switch (op.rule) {
    case Rule::kConvolution:
      read_convolution(op, function.inputs());
      break;
    case Rule::kMatrices:
      read_matrices(op, function.inputs(), 0);
      break;
    case Rule::kMatricesAndBias:
      read_matrices_and_bias(op, function.inputs());
      break;
    case Rule::kMaxPool:
      read_max_pool(op, function.inputs());
      break;
    case Rule::kShape:
      op.first = tensor_at(function.inputs(), 0);
      break;
    case Rule::kNone:
    case Rule::kSigns:
      break;
  }
}

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
  Followed& op = following.running.emplace_back();  // before anything can throw: ends() removes it
  op.name = function.name();
  const auto found = rules().find(op.name);
  if (found != rules().end()) {
    op.rule = found->second;
    try {
      read(op, function);
    } catch (const std::exception&) {  // arguments that torch does not document: the operator counts as unknown
      op.rule = Rule::kNone;
    }
  }
  return nullptr;
}

bool can_be_measured(const at::Tensor& gradient) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Python});
  return gradient.defined() && gradient.layout() == at::kStrided && !gradient.key_set().has_any(kWrapped);
}

/// Shows an observer the gradients of one node, once.
class Observation final : public autograd::FunctionPostHook {
 public:
  Observation(GradientObserver observer, std::size_t edge) : observer_(std::move(observer)), edge_(edge) {}

  autograd::variable_list operator()(const autograd::variable_list& given,
                                     const autograd::variable_list& got) override {
    if (edge_ < given.size() && !got.empty() && can_be_measured(given[edge_]) && can_be_measured(got[0]) &&
        !made_.exchange(true)) {
      try {
        observer_(given[edge_], got[0]);
      } catch (const c10::Error&) {  // a failed measurement must not fail the backward
      }
    }
    return given;
  }

  /// Compiled backwards are not measured.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  const GradientObserver observer_;
  const std::size_t edge_;
  std::atomic<bool> made_{false};
};

void ends(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (following.running.empty()) {
    return;
  }
  Followed op = std::move(following.running.back());
  following.running.pop_back();
  if (!op.observer || function.outputs().empty() || !function.outputs()[0].isTensor()) {
    return;
  }
  const auto node = function.outputs()[0].toTensor().grad_fn();
  if (node) {
    node->add_post_hook(std::make_unique<Observation>(std::move(op.observer), op.edge_of_weight));
  }
}

bool same_view(const at::Tensor& one, const at::Tensor& other) {
  return other.defined() && other.has_storage() && one.is_alias_of(other) &&
         one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes() &&
         one.strides() == other.strides();
}

/// Whether a leaf is a torch.nn.Parameter. Gradients of other leaves, such as a stage's inputs, may be passed on.
bool is_parameter(const at::Tensor& leaf) {
  const py::gil_scoped_acquire acquired;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf));
  return PyObject_IsInstance(object.ptr(), ParameterClass) == 1;
}

/// Whether the node's forward only made another view, copy or cast of its input. Such a node passes its gradient to one
/// place. Other nodes with one input (an embedding, a checkpoint) do more.
bool hands_on(const std::string& node) {
  static const std::unordered_set<std::string> known{
      "AliasBackward0",     "CloneBackward0",     "PermuteBackward0", "ReshapeAliasBackward0",
      "SelectBackward0",    "SliceBackward0",     "SplitBackward0",   "SplitWithSizesBackward0",
      "SqueezeBackward0",   "SqueezeBackward1",   "SqueezeBackward2", "TBackward0",
      "ToCopyBackward0",    "TransposeBackward0", "UnbindBackward0",  "UnsafeViewBackward0",
      "UnsqueezeBackward0", "ViewBackward0"};
  return known.contains(node);
}

/// The parameter that `weight` is, or is a view, copy or cast of; undefined if there is none.
at::Tensor parameter_of(const at::Tensor& weight) {
  constexpr int kMostSteps = 8;
  if (!weight.requires_grad()) {
    return {};
  }
  if (weight.is_leaf()) {
    return is_parameter(weight) ? weight : at::Tensor();
  }
  auto node = weight.grad_fn();
  for (int step = 0; node && step < kMostSteps; ++step) {
    if (auto* const end = dynamic_cast<autograd::AccumulateGrad*>(node.get())) {
      return is_parameter(end->variable) ? end->variable : at::Tensor();
    }
    if (node->num_outputs() != 1 || !hands_on(node->name())) {
      return {};
    }
    node = node->next_edge(0).function;
  }
  return {};
}

SavedUse of_weighted(Followed& op, const at::Tensor& saved) {
  const bool first = same_view(saved, op.first);
  const bool second = same_view(saved, op.second);
  SavedUse use{Need::kExact, op.name};
  use.into_convolution = op.rule == Rule::kConvolution && first;
  if (first == second || (second && op.rule == Rule::kConvolution)) {
    return use;
  }
  if (parameter_of(first ? op.first : op.second).defined()) {
    return use;  // the saved tensor is the weight
  }
  use.weight = parameter_of(first ? op.second : op.first);
  if (use.weight.defined()) {
    use.need = Need::kBounded;
    use.touched = first ? op.touched_by_first : op.touched_by_second;
    op.edge_of_weight = op.edge_of_first + (first ? 1 : 0);
  }
  return use;
}

SavedUse of_max_pool(const Followed& op, const at::Tensor& saved) {
  if (same_view(saved, op.first)) {
    return {Need::kShape, op.name};
  }
  SavedUse use{Need::kExact, op.name};
  const bool last = saved.dim() == 4 && saved.is_contiguous(at::MemoryFormat::ChannelsLast);
  if (saved.scalar_type() != at::kLong || saved.dim() < 3 || !(saved.is_contiguous() || last)) {
    return use;
  }
  use.need = Need::kIndices;
  use.pool = op.pool;
  use.pool->outputs = {saved.size(-2), saved.size(-1)};
  use.pool->inner = saved.is_contiguous() ? 1 : saved.size(1);
  const std::int64_t plane = saved.size(-2) * saved.size(-1) * use.pool->inner;
  use.pool->planes = plane == 0 ? 0 : saved.numel() / plane;
  return use;
}

}  // namespace

void begin_following_operators() {
  if (following.depth++ == 0) {
    following.callback =
        at::addThreadLocalCallback(at::RecordFunctionCallback(&begins, &ends).needsInputs(true).needsOutputs(true));
  }
}

void end_following_operators() noexcept {
  if (--following.depth == 0) {
    at::removeCallback(following.callback);
  }
}

SavedUse use_of(const at::Tensor& saved) {
  if (following.running.empty()) {
    return {};
  }
  Followed& op = following.running.back();
  switch (op.rule) {
    case Rule::kSigns:
      return {Need::kSigns, op.name};
    case Rule::kShape:
      return {same_view(saved, op.first) ? Need::kShape : Need::kExact, op.name};
    case Rule::kMaxPool:
      return of_max_pool(op, saved);
    case Rule::kConvolution:
    case Rule::kMatrices:
    case Rule::kMatricesAndBias:
      return of_weighted(op, saved);
    case Rule::kNone:
      break;
  }
  return {Need::kExact, op.name};
}

void observe_gradients(GradientObserver observer) {
  if (!following.running.empty()) {
    following.running.back().observer = std::move(observer);
  }
}

}  // namespace hydra
