#include "emulator/torch/call.h"

#include <ATen/core/op_registration/adaption.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <utility>

#include "emulator/cudart/control.h"
#include "emulator/torch/meta_shapes.h"
#include "emulator/torch/storages.h"
#include "emulator/torch/stream_work.h"
#include "emulator/torch/workspaces.h"

namespace emulated_cuda {

// ---- arguments ------------------------------------------------------------------------------------------------------

Call::Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
    : op_(op),
      traits_(traits_of(op)),
      stack_(stack),
      first_(stack.size() - op.schema().arguments().size()),
      invocation_(std::make_shared<Invocation>(op, traits_)) {
  note_plain(&op.schema());
  note_plain(clock_runs());
  for (std::size_t i = first_; i < stack.size(); ++i) {
    read(i - first_, stack[i]);
  }
  choose_device();
}

void Call::read(std::size_t index, const c10::IValue& value) {
  Slot& slot = invocation_->slots.emplace_back();
  if (value.isTensor()) {
    slot.kind = Slot::Kind::kTensor;
    read_tensor(index, slot, value.toTensor(), false);
  } else if (value.isTensorList()) {
    slot.kind = Slot::Kind::kTensors;
    const std::vector<at::Tensor> tensors = value.toTensorVector();
    note_plain(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      read_tensor(index, slot, tensor, false);
    }
  } else if (value.isOptionalTensorList()) {
    slot.kind = Slot::Kind::kOptionalTensors;
    const auto tensors = value.toOptionalTensorVector();
    note_plain(tensors.size());
    for (const std::optional<at::Tensor>& tensor : tensors) {
      read_tensor(index, slot, tensor.value_or(at::Tensor()), true);
    }
  } else {
    read_value(index, slot, value);
  }
}

void Call::read_tensor(std::size_t index, Slot& slot, const at::Tensor& tensor, bool any_host) {
  note_tensor(tensor);
  if (!tensor.defined()) {
    slot.operands.push_back(Operands::kUndefined);
    return;
  }
  if (tensor.is_cuda() && device_ == -1) {
    device_ = tensor.device().index();
  }
  const bool written = traits_.written[index];
  const bool elsewhere =
      tensor.is_cuda() ? tensor.device().index() != device_ : written || (!any_host && tensor.dim() > 0);
  if (elsewhere && !misplaced_.defined()) {
    misplaced_ = tensor;
    misplaced_argument_ = op_.schema().arguments()[index].name();
  }
  const int operand = invocation_->operands.add(tensor);
  if (static_cast<std::size_t>(operand) == tensors_.size()) {
    tensors_.push_back(tensor);
  }
  if (written && std::find(written_.begin(), written_.end(), operand) == written_.end()) {
    written_.push_back(operand);
  }
  slot.operands.push_back(operand);
  if (clock_runs()) {
    note_plain(operand);  // a tensor that is given twice is read once
  }
}

void Call::read_value(std::size_t index, Slot& slot, const c10::IValue& value) {
  if (static_cast<int>(index) == traits_.generator) {
    if (value.isGenerator()) {
      generator_ = value.toGenerator();
    }
    return;
  }
  if (static_cast<int>(index) == traits_.device) {
    if (value.isDevice()) {
      asked_device_ = value.toDevice();
      slot.value = c10::Device(c10::kCPU);
    }
    return;
  }
  note(value, traits_.numbers_shape || !traits_.number[index]);
  slot.value = value;
}

void Call::choose_device() {
  if (device_ != -1) {
    if (misplaced_.defined()) {
      c10::impl::common_device_check_failure(c10::Device(c10::kCUDA, device_), misplaced_,
                                             ("wrapper_CUDA_" + traits_.name).c_str(), misplaced_argument_.c_str());
    }
  } else if (asked_device_ && asked_device_->is_cuda() && asked_device_->has_index()) {
    device_ = asked_device_->index();
  } else {
    device_ = c10::cuda::current_device();
  }
}

// ---- the key under which shapes are remembered ----------------------------------------------------------------------

void Call::note_bytes(const void* bytes, std::size_t count) { key_.append(static_cast<const char*>(bytes), count); }

template <class Value>
void Call::note_plain(Value value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  note_bytes(&value, sizeof value);
}

void Call::note_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    key_ += 'u';
    return;
  }
  const auto* const impl = tensor.unsafeGetTensorImpl();
  key_ += tensor.is_cuda() ? 't' : 'h';
  key_ += static_cast<char>(tensor.scalar_type());
  key_ += static_cast<char>(impl->is_wrapped_number() + 2 * tensor.is_conj() + 4 * tensor.is_neg());
  note_plain(tensor.dim());
  note_bytes(tensor.sizes().data(), tensor.sizes().size() * sizeof(std::int64_t));
  note_bytes(tensor.strides().data(), tensor.strides().size() * sizeof(std::int64_t));
}

/// Numbers of floating point are left out unless nothing else decides the results' shapes: they differ at every call.
void Call::note(const c10::IValue& value, bool with_number) {
  if (value.isNone()) {
    key_ += 'n';
  } else if (value.isBool()) {
    key_ += value.toBool() ? 'T' : 'F';
  } else if (value.isInt()) {
    key_ += 'i';
    note_plain(with_number ? value.toInt() : 0);
  } else if (value.isDouble()) {
    key_ += 'd';
    note_plain(traits_.numbers_shape ? value.toDouble() : 0.0);
  } else if (value.isComplexDouble()) {
    key_ += 'c';
  } else if (value.isString()) {
    key_ += 's';
    note_plain(value.toStringRef().size());
    key_ += value.toStringRef();
  } else if (value.isList()) {
    key_ += 'l';
    note_plain(value.toListRef().size());
    for (const c10::IValue& element : value.toListRef()) {
      note(element, with_number);
    }
  } else {
    has_key_ = false;
  }
}

// ---- results of known shapes ----------------------------------------------------------------------------------------

std::vector<c10::IValue> Call::finish() {
  const c10::cuda::CUDAGuard guard(device_);
  if (traits_.random) {
    invocation_->draw = draw_from(generator_, device_);
  }
  if (clock_runs()) {
    const auto known = has_key_ ? find_shapes(key_) : nullptr;
    return start(known != nullptr ? known : shapes_on_meta());
  }
  if (traits_.multiplies) {
    take_workspace(device_);
  }
  const bool has_key = has_key_ && !traits_.waits_always;
  const auto shapes = has_key ? find_shapes(key_) : nullptr;
  count_call(shapes == nullptr);
  return shapes == nullptr ? wait() : start(shapes);
}

std::vector<c10::IValue> Call::start(const std::shared_ptr<const CallShapes>& shapes) {
  for (const Resized& resized : shapes->resized) {
    resize_tensor(tensor(resized.operand), resized.shape.sizes, at::IntArrayRef(resized.shape.strides));
    invocation_->operands.update(resized.operand, tensor(resized.operand));
  }
  std::vector<c10::IValue> results;
  std::vector<void*> outputs;
  for (std::size_t i = 0; i < shapes->results.size(); ++i) {
    const int argument = traits_.returned[i];
    results.push_back(argument < 0 ? start_result(shapes->results[i], outputs)
                                   : stack_[first_ + static_cast<std::size_t>(argument)]);
  }
  if (shapes->launches) {
    const auto run = [invocation = std::move(invocation_), shapes, outputs = std::move(outputs)] {
      invocation->run_into(*shapes, outputs);
    };
    enqueue(device_, run, shapes->work);
  }
  return results;
}

c10::IValue Call::start_result(const ResultShape& shape, std::vector<void*>& outputs) const {
  if (!shape.number.isNone()) {
    return shape.number;
  }
  if (!shape.list) {
    return start_tensor(shape.tensors.front(), outputs);
  }
  c10::List<at::Tensor> list;
  for (const TensorShape& one : shape.tensors) {
    list.push_back(start_tensor(one, outputs));
  }
  return list;
}

namespace {

at::Tensor in_storage_of(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t offset,
                         at::ScalarType dtype) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

}  // namespace

at::Tensor Call::start_tensor(const TensorShape& shape, std::vector<void*>& outputs) const {
  switch (shape.kind) {
    case TensorShape::Kind::kAlias:
      return in_storage_of(tensor(shape.operand), shape.sizes, shape.strides, shape.offset, shape.dtype);
    case TensorShape::Kind::kNew: {
      at::Tensor made = empty_strided_on_device(shape.sizes, shape.strides, shape.dtype, device_);
      outputs.push_back(made.storage().mutable_data());
      return made;
    }
    case TensorShape::Kind::kUndefined:
      break;
  }
  return {};
}

// ---- results under the virtual clock --------------------------------------------------------------------------------

std::shared_ptr<const CallShapes> Call::shapes_on_meta() {
  run_on_this_thread([this] { invocation_->run_on_meta(); });
  auto shapes = std::make_shared<CallShapes>(shapes_of(*invocation_, traits_, written_));
  shapes->work = work_of(op_, *invocation_, traits_);
  shapes->launches = !written_.empty() || makes_tensor(*shapes);
  if (has_key_) {
    remember_shapes(key_, *shapes);
  }
  return shapes;
}

// ---- results of unknown shapes --------------------------------------------------------------------------------------

struct Call::Found {
  CallShapes shapes;
  std::vector<std::pair<void*, at::Tensor>> to_copy;  // to the device
};

std::vector<c10::IValue> Call::wait() {
  run_now(device_, [invocation = invocation_] { invocation->run(); });
  Found found;
  find_resized(found);
  std::vector<c10::IValue> results;
  for (std::size_t i = 0; i < invocation_->results().size(); ++i) {
    const int argument = traits_.returned[i];
    if (argument < 0) {
      results.push_back(find_result(invocation_->results()[i], found));
    } else {
      found.shapes.results.emplace_back();
      results.push_back(stack_[first_ + static_cast<std::size_t>(argument)]);
    }
  }
  if (!found.to_copy.empty()) {
    enqueue(device_, [to_copy = std::move(found.to_copy)] {
      for (const auto& [to, from] : to_copy) {
        copy_bytes(to, from);
      }
    });
  }
  if (has_key_ && !traits_.waits_always) {
    remember_shapes(key_, std::move(found.shapes));
  }
  return results;
}

void Call::find_resized(Found& found) {
  for (const int operand : written_) {
    const at::Tensor& here = tensor(operand);
    const at::Tensor& there = invocation_->opened()[static_cast<std::size_t>(operand)];
    const bool moved = there.storage().data() != invocation_->operands.data(operand);
    if (!moved && here.sizes() == there.sizes() && here.strides() == there.strides()) {
      continue;
    }
    const auto shape = TensorShape::of(there, TensorShape::Kind::kNew);
    resize_tensor(here, shape.sizes, at::IntArrayRef(shape.strides));
    if (moved) {
      found.to_copy.emplace_back(here.mutable_data_ptr(), there);
    }
    found.shapes.resized.push_back({operand, shape});
  }
}

c10::IValue Call::find_result(const c10::IValue& result, Found& found) const {
  ResultShape shape;
  c10::IValue value = result;
  if (result.isTensor()) {
    value = find_tensor(result.toTensor(), shape, found);
  } else if (result.isTensorList()) {
    shape.list = true;
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : result.toTensorVector()) {
      list.push_back(find_tensor(one, shape, found));
    }
    value = list;
  }
  found.shapes.results.push_back(std::move(shape));
  return value;
}

at::Tensor Call::find_tensor(const at::Tensor& result, ResultShape& shape, Found& found) const {
  if (!result.defined()) {
    shape.tensors.emplace_back();
    return {};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == at::kStrided && result.is_cpu(), traits_.name,
                              ": the emulated device has dense tensors only");
  const int operand = invocation_->operands.find_storage(result.storage().data());
  auto one = TensorShape::of(result, operand < 0 ? TensorShape::Kind::kNew : TensorShape::Kind::kAlias);
  one.operand = operand;
  std::vector<void*> outputs;
  at::Tensor made = start_tensor(one, outputs);
  if (!outputs.empty()) {
    found.to_copy.emplace_back(outputs.front(), result);
  }
  shape.tensors.push_back(std::move(one));
  return made;
}

}  // namespace emulated_cuda
