// One call of an operator, as the host sees it: its arguments, the device, and what is known of its results.
//
// A call reads its arguments from the stack and leaves them there. Used by one thread, for the length of the call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "emulator/torch/invocation.h"

namespace emulated_cuda {

class Call {
 public:
  /// Throws torch's error for tensors of several devices. A host tensor without dimensions, or one that indexes, may
  /// stand beside device tensors.
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  /// Runs the operator, on the current stream of its device, and returns its results. It is waited for if the shapes of
  /// its results are not known.
  std::vector<c10::IValue> finish();

 private:
  void read(std::size_t index, const c10::IValue& value);
  void read_tensor(std::size_t index, Slot& slot, const at::Tensor& tensor, bool any_host);
  void read_value(std::size_t index, Slot& slot, const c10::IValue& value);
  void note(const c10::IValue& value, bool with_number);
  void note_tensor(const at::Tensor& tensor);
  void note_bytes(const void* bytes, std::size_t count);
  template <class Value>
  void note_plain(Value value);
  void choose_device();

  std::vector<c10::IValue> start(const std::shared_ptr<const CallShapes>& shapes);
  std::vector<c10::IValue> wait();
  /// Under the virtual clock: shapes from meta, and the kernel's work.
  std::shared_ptr<const CallShapes> shapes_on_meta();
  c10::IValue start_result(const ResultShape& shape, std::vector<void*>& outputs) const;
  at::Tensor start_tensor(const TensorShape& shape, std::vector<void*>& outputs) const;
  const at::Tensor& tensor(int operand) const { return tensors_[static_cast<std::size_t>(operand)]; }

  struct Found;
  void find_resized(Found& found);
  c10::IValue find_result(const c10::IValue& result, Found& found) const;
  at::Tensor find_tensor(const at::Tensor& result, ResultShape& shape, Found& found) const;

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  const torch::jit::Stack& stack_;
  const std::size_t first_;  // the first argument's place on the stack
  std::shared_ptr<Invocation> invocation_;
  std::vector<at::Tensor> tensors_;  // by operand
  std::vector<int> written_;         // operands
  std::optional<at::Generator> generator_;
  c10::DeviceIndex device_ = -1;
  std::optional<c10::Device> asked_device_;
  at::Tensor misplaced_;  // the first tensor that may not stand beside the device's
  std::string misplaced_argument_;
  std::string key_;
  bool has_key_ = true;
};

}  // namespace emulated_cuda
