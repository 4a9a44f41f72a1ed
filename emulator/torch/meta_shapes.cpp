#include "emulator/torch/meta_shapes.h"

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace emulated_cuda {

namespace {

using Tensors = std::vector<at::Tensor>;

/// The operand in whose storage a result lies, or -1.
int operand_of(const Invocation& invocation, const at::Tensor& result) {
  const auto* const storage = result.storage().unsafeGetStorageImpl();
  const Tensors& opened = invocation.opened();
  for (std::size_t i = 0; i < opened.size(); ++i) {
    if (!invocation.operands.on_host(static_cast<int>(i)) && opened[i].storage().unsafeGetStorageImpl() == storage) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

TensorShape shape_of(const Invocation& invocation, const at::Tensor& result) {
  if (!result.defined()) {
    return {};
  }
  const int operand = operand_of(invocation, result);
  TensorShape shape = TensorShape::of(result, operand < 0 ? TensorShape::Kind::kNew : TensorShape::Kind::kAlias);
  shape.operand = operand;
  return shape;
}

ResultShape shape_of(const Invocation& invocation, const c10::IValue& result) {
  ResultShape shape;
  if (result.isTensor()) {
    shape.tensors.push_back(shape_of(invocation, result.toTensor()));
  } else if (result.isTensorList()) {
    shape.list = true;
    for (const at::Tensor& one : result.toTensorVector()) {
      shape.tensors.push_back(shape_of(invocation, one));
    }
  } else {
    shape.number = result;
  }
  return shape;
}

/// What it touches at most: an expanded tensor is read once.
double bytes_of(const at::Tensor& tensor) {
  return static_cast<double>(std::min<std::size_t>(tensor.nbytes(), tensor.storage().nbytes()));
}

template <class Numbers>
double bytes_of(const Tensors& given, const Numbers& operands) {
  double sum = 0.0;
  for (const int operand : operands) {
    sum += operand == Operands::kUndefined ? 0.0 : bytes_of(given[static_cast<std::size_t>(operand)]);
  }
  return sum;
}

double size_of(const at::Tensor& tensor, std::int64_t dimension) { return static_cast<double>(tensor.size(dimension)); }

/// Of a product: rows times columns times what is summed, of each matrix of a batch.
double product_flops(const at::Tensor& first, const at::Tensor& second) {
  return 2.0 * static_cast<double>(first.numel()) * size_of(second, -1);
}

double attention_flops(const at::Tensor& query, const at::Tensor& key, bool causal) {
  return 4.0 * static_cast<double>(query.numel()) * size_of(key, -2) * (causal ? 0.5 : 1.0);
}

/// Operations by the name of an operator, from its arguments in their order.
double flops_of(std::string_view name, const Invocation& invocation) {
  constexpr double kBackwardProducts = 2.5;  // of attention: five products beside forward's two
  const auto tensor = [&](std::size_t argument) {
    return invocation.opened().at(static_cast<std::size_t>(invocation.slots.at(argument).operands.front()));
  };
  const auto is_true = [&](std::size_t argument) { return invocation.slots.at(argument).value.toBool(); };
  if (name == "aten::mm" || name == "aten::bmm") {
    return product_flops(tensor(0), tensor(1));
  }
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    return product_flops(tensor(1), tensor(2));
  }
  if (name == "aten::_scaled_dot_product_flash_attention") {
    return attention_flops(tensor(0), tensor(1), is_true(4));
  }
  if (name == "aten::_scaled_dot_product_flash_attention_backward") {
    return kBackwardProducts * attention_flops(tensor(1), tensor(2), is_true(11));
  }
  return 0.0;
}

/// Operators that read only some rows of their first tensor.
bool reads_rows(std::string_view name) {
  return name == "aten::embedding" || name == "aten::index_select" || name == "aten::gather" ||
         name == "aten::nll_loss_forward";
}

}  // namespace

CallShapes shapes_of(const Invocation& invocation, const OperatorTraits& traits, const std::vector<int>& written) {
  CallShapes shapes;
  const auto& results = invocation.results();
  for (std::size_t i = 0; i < results.size(); ++i) {
    const bool is_argument = traits.returned[i] >= 0;
    shapes.results.push_back(is_argument ? ResultShape{} : shape_of(invocation, results[i]));
  }
  for (const int operand : written) {
    const at::Tensor& now = invocation.opened()[static_cast<std::size_t>(operand)];
    if (!invocation.operands.lies_as(operand, now)) {
      shapes.resized.push_back({operand, TensorShape::of(now, TensorShape::Kind::kNew)});
    }
  }
  return shapes;
}

bool makes_tensor(const CallShapes& shapes) {
  return std::ranges::any_of(shapes.results, [](const ResultShape& result) {
    return std::ranges::any_of(result.tensors,
                               [](const TensorShape& one) { return one.kind == TensorShape::Kind::kNew; });
  });
}

KernelWork work_of(const c10::OperatorHandle& op, const Invocation& invocation, const OperatorTraits& traits) {
  const std::string& name = op.operator_name().name;
  const Tensors& given = invocation.opened();
  KernelWork work;
  std::set<int> read;  // each once
  for (std::size_t i = 0; i < invocation.slots.size(); ++i) {
    const std::vector<int>& operands = invocation.slots[i].operands;
    const bool is_read = traits.written[i] ? name.ends_with('_') : i > 0 || !reads_rows(name);
    if (is_read) {
      read.insert(operands.begin(), operands.end());
    }
    if (traits.written[i]) {
      work.bytes += bytes_of(given, operands);
    }
  }
  work.bytes += bytes_of(given, read);
  for (const c10::IValue& result : invocation.results()) {
    for (const at::Tensor& one : tensors_of(result)) {
      const bool is_new = one.defined() && operand_of(invocation, one) < 0;
      work.bytes += is_new ? bytes_of(one) * (reads_rows(name) ? 2.0 : 1.0) : 0.0;
    }
  }
  const bool half = !given.empty() && given.front().defined() && given.front().itemsize() == 2;
  (half ? work.half_flops : work.full_flops) = flops_of(name, invocation);
  return work;
}

}  // namespace emulated_cuda
