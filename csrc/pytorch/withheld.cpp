#include "csrc/pytorch/withheld.h"

#include <c10/core/StorageImpl.h>

#include <utility>

#include "csrc/pytorch/fault_key.h"

namespace hydra {

namespace {

using WithheldPtr = c10::intrusive_ptr<Withheld>;

void release_withheld(void* context) { auto withheld = WithheldPtr::reclaim(static_cast<Withheld*>(context)); }

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace

Withheld* withheld_of(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return nullptr;
  }
  auto& pointer = storage_of(tensor)->_mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &release_withheld ? static_cast<Withheld*>(pointer.get_context()) : nullptr;
}

void withhold(const at::Tensor& tensor, const std::weak_ptr<PagedModel>& owner, std::int32_t block) {
  c10::StorageImpl* const storage = storage_of(tensor);
  if (withheld_of(tensor) == nullptr) {
    auto withheld = c10::make_intrusive<Withheld>();
    withheld->owner = owner;
    withheld->block = block;
    withheld->memory = storage->set_data_ptr(c10::DataPtr());
    Withheld* const context = withheld.release();
    storage->set_data_ptr_noswap({nullptr, context, &release_withheld, c10::Device(c10::kCPU)});
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "hydra_ext: an optimizer step is writing this tensor now; operations wait for it, raw access cannot. Call "
        "run.sync() first");
  }
  add_fault_key(*tensor.unsafeGetTensorImpl());
}

void give_back(const at::Tensor& tensor) noexcept {
  if (Withheld* const withheld = withheld_of(tensor)) {
    c10::StorageImpl* const storage = storage_of(tensor);
    storage->clear_data_ptr_access_error_msg_();
    storage->set_data_ptr_noswap(std::exchange(withheld->memory, c10::DataPtr()));
  }
  remove_fault_key(*tensor.unsafeGetTensorImpl());
}

}  // namespace hydra
