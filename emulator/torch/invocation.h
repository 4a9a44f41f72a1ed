// One call of an operator, as its stream runs it: arguments without device storages, and the CPU's kernel.
//
// The host fills it, hands it to the stream, and touches it again only after it has waited. `run` and `run_into` are
// called on a stream's thread, once. Under the virtual clock the host calls `run_on_meta` instead.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "emulator/torch/operands.h"
#include "emulator/torch/operator_traits.h"
#include "emulator/torch/random.h"
#include "emulator/torch/result_shapes.h"

namespace emulated_cuda {

/// One argument: a value, or the operands that it is made of.
struct Slot {
  enum class Kind { kValue, kTensor, kTensors, kOptionalTensors };
  Kind kind = Kind::kValue;
  c10::IValue value;
  std::vector<int> operands;
};

class Invocation {
 public:
  Invocation(const c10::OperatorHandle& op, const OperatorTraits& traits) : op_(op), traits_(traits) {}

  std::vector<Slot> slots;
  Operands operands;
  std::optional<Draw> draw;

  void run();
  /// Runs, and puts the new results where `outputs` says, in their order. Throws if they have other shapes.
  void run_into(const CallShapes& shapes, const std::vector<void*>& outputs);

  /// Runs on tensors without bytes, on the calling thread, for the shapes alone.
  void run_on_meta();

  /// On the CPU, or on meta.
  const std::vector<c10::IValue>& results() const noexcept { return results_; }
  /// The operands as the kernel left them.
  const std::vector<at::Tensor>& opened() const noexcept { return opened_; }

 private:
  c10::IValue argument(const Slot& slot) const;
  void check_sizes(const CallShapes& shapes) const;

  const c10::OperatorHandle op_;
  const OperatorTraits& traits_;
  std::vector<at::Tensor> opened_;
  std::vector<c10::IValue> results_;
};

/// The tensors of a result.
std::vector<at::Tensor> tensors_of(const c10::IValue& result);
/// Copies a CPU tensor's bytes, gaps too, to where a tensor of the same sizes and strides begins.
void copy_bytes(void* to, const at::Tensor& from);

}  // namespace emulated_cuda
