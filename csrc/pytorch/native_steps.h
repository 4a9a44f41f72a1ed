// From tensors to the native loops of optimizer steps: parameters, gradients and state by their addresses, wherever
// their home is. Tensors that no loop can work on are a StateError.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <variant>
#include <vector>

#include "csrc/optim/step_plan.h"

namespace hydra {

using OptionalTensor = std::optional<at::Tensor>;

/// The plan keeps no tensor alive. With the interpreter's lock or without.
void add_update(StepPlan& plan, const std::variant<AdamStep, SgdStep>& step, const at::Tensor& weights,
                const at::Tensor& gradient, const OptionalTensor& master, const OptionalTensor& first_moment,
                const OptionalTensor& second_moment, std::uint32_t seed);

/// See norm.h; where a tensor's home is. Without the interpreter's lock.
std::vector<double> tensor_sums(const std::vector<at::Tensor>& tensors, ThreadPool& pool, InstructionSet instructions);

}  // namespace hydra
