#include "emulator/torch/operator_traits.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <unordered_map>

#include "emulator/torch/host_kernels.h"

namespace emulated_cuda {

namespace {

bool is_tensor(const c10::TypePtr& type) {
  const std::string text = type->str();
  return text.find("Tensor") != std::string::npos;
}

/// A Scalar, or a list of them.
bool has_number(const c10::Type& type) {
  const auto contained = type.containedTypes();
  return type.kind() == c10::TypeKind::NumberType ||
         std::any_of(contained.begin(), contained.end(), [](const c10::TypePtr& inner) { return has_number(*inner); });
}

/// Results whose shapes depend on data, beside those that torch tags so.
const std::set<std::string>& shaped_by_data() {
  static const std::set<std::string> names{"aten::segment_reduce", "aten::_segment_reduce_backward"};
  return names;
}

bool waits_always(const c10::OperatorHandle& op, const std::string& name) {
  const auto& returns = op.schema().returns();
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
         shaped_by_data().contains(name) ||
         std::any_of(returns.begin(), returns.end(),
                     [](const c10::Argument& result) { return !is_tensor(result.type()); });
}

/// What calls the matrix library on a GPU.
bool multiplies(const std::string& name) {
  static const std::set<std::string> names{
      "aten::mm",      "aten::addmm",    "aten::addmm_", "aten::_addmm_activation", "aten::bmm",
      "aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::addbmm_",           "aten::addmv",
      "aten::addmv_",  "aten::dot",      "aten::vdot",
  };
  return names.contains(name);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

int returned_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!is_written(result)) {
    return -1;
  }
  const auto& arguments = schema.arguments();
  const auto same = std::find_if(arguments.begin(), arguments.end(), [&](const c10::Argument& argument) {
    return is_written(argument) && argument.alias_info()->beforeSets() == result.alias_info()->beforeSets();
  });
  return same == arguments.end() ? -1 : static_cast<int>(same - arguments.begin());
}

std::unique_ptr<OperatorTraits> describe(const c10::OperatorHandle& op) {
  auto traits = std::make_unique<OperatorTraits>();
  const c10::FunctionSchema& schema = op.schema();
  traits->name = c10::toString(op.operator_name());
  traits->waits_always = waits_always(op, traits->name);
  traits->multiplies = multiplies(op.operator_name().name);
  traits->random = op.hasTag(at::Tag::nondeterministic_seeded);
  traits->numbers_shape = true;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const std::string type = argument.type()->str();
    traits->written.push_back(is_written(argument));
    traits->number.push_back(has_number(*argument.type()));
    if (is_tensor(argument.type()) && !traits->written.back()) {
      traits->numbers_shape = false;
    }
    if (type.find("Generator") != std::string::npos) {
      traits->generator = static_cast<int>(i);
      traits->random = true;
    } else if (type.find("Device") != std::string::npos) {
      traits->device = static_cast<int>(i);
    }
  }
  for (const c10::Argument& result : schema.returns()) {
    traits->returned.push_back(returned_argument(schema, result));
  }
  traits->host_kernel = host_kernel(traits->name);
  return traits;
}

}  // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  static std::shared_mutex mutex;
  static std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorTraits>> all;
  const c10::FunctionSchema* const key = &op.schema();
  {
    const std::shared_lock lock(mutex);
    const auto known = all.find(key);
    if (known != all.end()) {
      return *known->second;
    }
  }
  auto traits = describe(op);
  const std::unique_lock lock(mutex);
  return *all.try_emplace(key, std::move(traits)).first->second;
}

}  // namespace emulated_cuda
