#include "csrc/pytorch/parameters/withheld.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MapAllocator.h>
#include <c10/core/StorageImpl.h>

#include <mutex>
#include <utility>

#include "csrc/pytorch/parameters/fault_key.h"
#include "csrc/pytorch/parameters/watched_hosts.h"

namespace hydra {

namespace {

/// Guards changes of storages' data pointers. Never destroyed, on purpose: tensors may outlive statics.
std::mutex& changing() {
  static auto* const mutex = std::make_unique<std::mutex>().release();
  return *mutex;
}

void release_withheld(void* context) { auto withheld = WithheldPtr::reclaim(static_cast<Withheld*>(context)); }

Withheld* context_of(c10::StorageImpl& storage) noexcept {
  auto& pointer = storage._mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &release_withheld ? static_cast<Withheld*>(pointer.get_context()) : nullptr;
}

/// Moves the storage's bytes to `context`, which returns them later.
void take_away_locked(c10::StorageImpl& storage, WithheldPtr context) {
  const bool at_home = context->at_home != nullptr;
  context->memory = storage.set_data_ptr(c10::DataPtr());
  storage.set_data_ptr_noswap({nullptr, context.release(), &release_withheld, c10::Device(c10::kCPU)});
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      at_home ? "hydra_ext: the home of this tensor is the device now; operations bring it to the host, raw access "
                "cannot. Call run.sync() first"
              : "hydra_ext: an optimizer step is writing this tensor now; operations wait for it, raw access cannot. "
                "Call run.sync() first");
}

WithheldPtr make_context(const std::weak_ptr<PagedModel>& owner, std::int32_t block, std::byte* at_home) {
  auto withheld = c10::make_intrusive<Withheld>();
  withheld->owner = owner;
  withheld->block = block;
  withheld->at_home = at_home;
  return withheld;
}

}  // namespace

WithheldPtr withheld_of(const c10::Storage& storage) {
  const std::lock_guard lock(changing());
  Withheld* const context = context_of(*storage.unsafeGetStorageImpl());
  return context == nullptr ? WithheldPtr() : WithheldPtr::reclaim_copy(context);
}

WithheldPtr withheld_of(const at::Tensor& tensor) {
  const bool stored = tensor.defined() && tensor.unsafeGetTensorImpl()->has_storage();
  return stored ? withheld_of(tensor.unsafeGetTensorImpl()->unsafe_storage()) : WithheldPtr();
}

at::Tensor make_withheld(const at::Tensor& like, const std::weak_ptr<PagedModel>& owner, std::int32_t block,
                         std::byte* at_home) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(like.nbytes()),
                                                       c10::DataPtr(), /*allocator=*/nullptr, /*resizable=*/false);
  {
    const std::lock_guard lock(changing());
    take_away_locked(*storage, make_context(owner, block, at_home));
  }
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU).add(kFaultKey), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

c10::DataPtr note_on_disk(const WithheldTensor& withheld) noexcept {
  c10::StorageImpl* const implementation = withheld.storage.unsafeGetStorageImpl();
  c10::DataPtr freed;
  const std::lock_guard lock(changing());
  if (Withheld* const context = context_of(*implementation)) {
    freed = std::exchange(context->memory, c10::DataPtr());
    implementation->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "hydra_ext: the home of this tensor is the disk now; operations bring it to the host, raw access cannot. Call "
        "run.sync() first");
  }
  return freed;
}

bool has_idle_wrapper(const c10::Storage& storage) {
  // Python's wrapper of a storage lives as long as the storage.
  return storage.use_count() > 1 && storage.unsafeGetStorageImpl()->pyobj_slot()->has_unique_reference();
}

std::size_t references_to(const c10::Storage& storage) {
  return storage.use_count() - (has_idle_wrapper(storage) ? 1 : 0);
}

bool is_lent(const c10::Storage& storage) {
  static const c10::DeleterFnPtr from_outside =
      c10::InefficientStdFunctionContext::makeDataPtr(nullptr, [](void*) {}, c10::Device(c10::kCPU)).get_deleter();
  const c10::DataPtr& memory = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return memory.get() != nullptr && (memory.get_deleter() == from_outside || memory.get_context() == nullptr ||
                                     at::MapAllocator::fromDataPtr(memory) != nullptr);
}

bool is_alone(const at::Tensor& tensor) {
  return is_whole(tensor) && references_to(tensor.storage()) == 1 && !is_lent(tensor.storage());
}

bool is_whole(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && !withheld_of(tensor) && tensor.storage_offset() == 0 &&
         tensor.nbytes() == tensor.storage().nbytes();
}

bool shows(const at::Tensor& tensor, const c10::Storage& storage) noexcept {
  return storage && tensor.defined() && tensor.unsafeGetTensorImpl()->has_storage() &&
         tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
}

void* home_data(const at::Tensor& tensor) {
  const WithheldPtr withheld = withheld_of(tensor);
  if (!withheld || withheld->at_home == nullptr) {
    return nullptr;
  }
  return withheld->at_home + tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
}

WithheldTensor withhold(const at::Tensor& tensor, const std::weak_ptr<PagedModel>& owner, std::int32_t block,
                        std::byte* at_home) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  c10::StorageImpl* const implementation = storage.unsafeGetStorageImpl();
  {
    const std::lock_guard lock(changing());
    if (context_of(*implementation) == nullptr) {
      take_away_locked(*implementation, make_context(owner, block, at_home));
    }
  }
  add_fault_key(*tensor.unsafeGetTensorImpl());
  return {tensor, storage};
}

void give_back(const WithheldTensor& withheld) noexcept {
  c10::StorageImpl* const implementation = withheld.storage.unsafeGetStorageImpl();
  c10::DataPtr away;  // destroyed without the lock
  {
    const std::lock_guard lock(changing());
    if (Withheld* const context = context_of(*implementation)) {
      implementation->clear_data_ptr_access_error_msg_();
      away = implementation->set_data_ptr(std::exchange(context->memory, c10::DataPtr()));
    }
  }
  // Else the tensor has another storage, which may be withheld too.
  if (shows(withheld.tensor, withheld.storage) && !watched_hosts::includes(implementation)) {
    remove_fault_key(*withheld.tensor.unsafeGetTensorImpl());
  }
}

void give_up(const WithheldTensor& withheld) noexcept {
  c10::StorageImpl* const implementation = withheld.storage.unsafeGetStorageImpl();
  const std::lock_guard lock(changing());
  if (Withheld* const context = context_of(*implementation)) {
    context->at_home = nullptr;
    implementation->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "hydra_ext: this tensor's bytes are lost: they could not be brought to the host when its offload context "
        "ended");
  }
}

}  // namespace hydra
