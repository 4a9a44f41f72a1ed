// From tensors to the native loops of optimizer steps: a StepPlan whose addresses are looked up when it is to run, so
// that tensors may move between the host and their home on a device until then.
//
// Keeps its tensors alive. Tensors that no loop can work on are a StateError.
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

/// What one step does to one parameter; see ParameterUpdate. All lie in memory as the weights do.
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
  /// Null where a tensor has no bytes that the asker can use.
  using AddressOf = std::function<void*(const at::Tensor&)>;

  explicit TensorPlan(InstructionSet instructions = best_instruction_set()) : instructions_(instructions) {}

  /// Weights and new weights, if there are any, share no memory.
  void add(TensorUpdate update);
  /// Brings to the host what is withheld. Without the interpreter's lock.
  StepPlan on_host() const;
  /// None unless all tensors have an address.
  std::optional<StepPlan> at(const AddressOf& address_of) const;

 private:
  InstructionSet instructions_;
  std::vector<TensorUpdate> updates_;
};

/// What norm.h takes; throws unless the tensor is dense memory of the host, or has its home on a device.
NormInput norm_input(const at::Tensor& tensor, const void* data);

/// See norm.h; where a tensor's home is, or else on the host. Without the interpreter's lock.
std::vector<double> tensor_sums(const std::vector<at::Tensor>& tensors, ThreadPool& pool, InstructionSet instructions);

}  // namespace hydra
