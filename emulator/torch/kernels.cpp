#include "emulator/torch/kernels.h"

#include <torch/library.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "emulator/cudart/virtual_clock.h"
#include "emulator/torch/call.h"

namespace emulated_cuda {

void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const cudart::Pause pause;  // a launch is charged instead
  std::vector<c10::IValue> results = Call(op, *stack).finish();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (c10::IValue& result : results) {
    stack->push_back(std::move(result));
  }
}

namespace {

/// Composite operators that CUDA has kernels for.
bool is_one_kernel(const c10::OperatorName& operator_name) {
  static const std::set<std::string> names{
      "aten::convolution",
      "aten::convolution_backward",
      "aten::native_layer_norm",
      "aten::native_group_norm",
      "aten::_stack",
      "aten::addr",
      "aten::linalg__powsum",
  };
  const std::string& name = operator_name.name;
  if (name.starts_with("aten::_foreach_")) {
    const bool is_functional_list = name == "aten::_foreach_mm";
    return !operator_name.overload_name.ends_with("out") && !is_functional_list;
  }
  return names.contains(name);
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

/// Kept for the life of the process: the dispatcher outlives all.
std::vector<c10::RegistrationHandleRAII> replace_composite_kernels() {
  std::vector<c10::RegistrationHandleRAII> kept;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!is_one_kernel(name)) {
      continue;
    }
    const auto op = dispatcher.findSchema(name);
    if (op && is_composite(*op)) {
      kept.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                             c10::KernelFunction::makeFromBoxedFunction<&run_on_stream>(), std::nullopt,
                                             nullptr, "emulated CUDA"));
    }
  }
  return kept;
}

const auto* const kept_registrations =
    std::make_unique<std::vector<c10::RegistrationHandleRAII>>(replace_composite_kernels()).release();

}  // namespace

}  // namespace emulated_cuda

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulated_cuda::run_on_stream>());
}
