#include "emulator/torch/operands.h"

#include <ATen/ops/clone.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace emulated_cuda {

namespace {

at::Tensor copy_of(const at::Tensor& host) {
  at::Tensor copy = host.clone();
  if (host.unsafeGetTensorImpl()->is_wrapped_number()) {  // it decides the type of a result, and is not cloned
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

}  // namespace

Operands::Operand Operands::describe(const at::Tensor& tensor) {
  Operand operand;
  const c10::Storage& storage = tensor.storage();
  const void* const identity = storage.unsafeGetStorageImpl();
  const auto known = std::find_if(bytes_.begin(), bytes_.end(), [&](const Bytes& b) { return b.storage == identity; });
  operand.bytes = static_cast<std::size_t>(std::distance(bytes_.begin(), known));
  if (known == bytes_.end()) {
    bytes_.push_back({storage.mutable_data(), storage.nbytes(), identity});
  }
  operand.tensor = tensor.unsafeGetTensorImpl();
  operand.sizes = tensor.sizes();
  operand.strides = tensor.strides();
  operand.offset = tensor.storage_offset();
  operand.dtype = tensor.dtype();
  operand.conjugate = tensor.is_conj();
  operand.negative = tensor.is_neg();
  return operand;
}

int Operands::add(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return kUndefined;
  }
  const void* const identity = tensor.unsafeGetTensorImpl();
  const auto known = std::find_if(operands_.begin(), operands_.end(),
                                  [&](const Operand& operand) { return operand.tensor == identity; });
  if (known != operands_.end()) {
    return static_cast<int>(std::distance(operands_.begin(), known));
  }
  if (tensor.is_cuda()) {
    operands_.push_back(describe(tensor));
  } else {
    Operand operand;
    operand.host = copy_of(tensor);
    operand.tensor = identity;
    operands_.push_back(std::move(operand));
  }
  return static_cast<int>(operands_.size()) - 1;
}

void Operands::update(int number, const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  for (Bytes& bytes : bytes_) {
    if (bytes.storage == storage.unsafeGetStorageImpl()) {
      bytes.data = storage.mutable_data();
      bytes.size = storage.nbytes();
    }
  }
  operands_[static_cast<std::size_t>(number)] = describe(tensor);
}

int Operands::find_storage(const void* data) const noexcept {
  for (std::size_t i = 0; i < operands_.size(); ++i) {
    if (data != nullptr && !operands_[i].host.defined() && bytes_[operands_[i].bytes].data == data) {
      return static_cast<int>(i);
    }
  }
  return kUndefined;
}

bool Operands::lies_as(int number, const at::Tensor& tensor) const {
  const Operand& operand = operands_[static_cast<std::size_t>(number)];
  return operand.host.defined() ||
         (tensor.sizes() == at::IntArrayRef(operand.sizes) && tensor.strides() == at::IntArrayRef(operand.strides));
}

const void* Operands::data(int number) const { return bytes_[operands_[static_cast<std::size_t>(number)].bytes].data; }

std::vector<at::Tensor> Operands::open() const { return open_on(c10::Device(c10::kCPU)); }

std::vector<at::Tensor> Operands::open_on_meta() const { return open_on(c10::Device(c10::kMeta)); }

std::vector<at::Tensor> Operands::open_on(c10::Device device) const {
  const bool has_bytes = !device.is_meta();
  std::vector<c10::Storage> storages;
  storages.reserve(bytes_.size());
  for (const Bytes& bytes : bytes_) {
    storages.emplace_back(c10::Storage::use_byte_size_t(), bytes.size,
                          c10::DataPtr(has_bytes ? bytes.data : nullptr, device), c10::GetAllocator(device.type()),
                          true);
  }
  const c10::DispatchKeySet keys(has_bytes ? c10::DispatchKey::CPU : c10::DispatchKey::Meta);
  std::vector<at::Tensor> tensors;
  tensors.reserve(operands_.size());
  for (const Operand& operand : operands_) {
    if (operand.host.defined()) {
      tensors.push_back(has_bytes || operand.host.dim() == 0 ? operand.host : operand.host.to(device));
      continue;
    }
    at::Tensor tensor =
        at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storages[operand.bytes]), keys, operand.dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(operand.sizes, operand.strides, operand.offset);
    tensor._set_conj(operand.conjugate);
    tensor._set_neg(operand.negative);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace emulated_cuda
