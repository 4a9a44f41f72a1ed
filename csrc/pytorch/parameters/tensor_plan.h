// Turns tensors into a StepPlan for the native loops of optimizer steps. Addresses are looked up when the plan is to
// run, so that tensors may move between the host and a home on a device until then.
//
// Keeps its tensors alive. Throws StateError for tensors that the loops do not support. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <variant>
#include <vector>

#include "csrc/optim/norm.h"
#include "csrc/optim/step_plan.h"

namespace hydra {

using OptionalTensor = std::optional<at::Tensor>;

/// The update of one parameter in one step; see ParameterUpdate. All tensors have the weights' sizes and strides.
struct TensorUpdate {
  std::variant<AdamStep, SgdStep> step;
  at::Tensor weights;
  OptionalTensor new_weights;
  at::Tensor gradient;
  OptionalTensor master;
  OptionalTensor first_moment;
  OptionalTensor second_moment;
  std::uint32_t seed = 0;
};

class TensorPlan {
 public:
  /// Returns a tensor's address, or null if the tensor has no bytes that the caller can use.
  using AddressOf = std::function<void*(const at::Tensor&)>;

  explicit TensorPlan(InstructionSet instructions = best_instruction_set()) : instructions_(instructions) {}

  /// Adds an update. Throws StateError if new weights share memory with the weights.
  void add(TensorUpdate update);
  /// Returns the plan on the host, and brings withheld tensors there. Call it without the interpreter lock.
  StepPlan on_host() const;
  /// Returns the plan at the given addresses, or nullopt unless all tensors have one.
  std::optional<StepPlan> at(const AddressOf& address_of) const;

 private:
  InstructionSet instructions_;
  std::vector<TensorUpdate> updates_;
};

/// Returns the input of norm.h for a tensor. Throws unless the tensor is dense host memory, or has its home on a
/// device.
NormInput norm_input(const at::Tensor& tensor, const void* data);

/// Returns the tensors' sums of squares (norm.h). Tensors with their home on a device are summed there, others on the
/// host. Call it without the interpreter lock.
std::vector<double> tensor_sums(const std::vector<at::Tensor>& tensors, ThreadPool& pool, InstructionSet instructions);

}  // namespace hydra
