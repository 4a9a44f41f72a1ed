#include "csrc/pytorch/withheld.h"

#include <c10/core/StorageImpl.h>

#include <utility>

#include "csrc/pytorch/fault_key.h"

namespace hydra {

namespace {

using WithheldPtr = c10::intrusive_ptr<Withheld>;

void release_withheld(void* context) { auto withheld = WithheldPtr::reclaim(static_cast<Withheld*>(context)); }

Withheld* withheld_of(c10::StorageImpl& storage) noexcept {
  auto& pointer = storage._mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &release_withheld ? static_cast<Withheld*>(pointer.get_context()) : nullptr;
}

}  // namespace

Withheld* withheld_of(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return nullptr;
  }
  return withheld_of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

WithheldTensor withhold(const at::Tensor& tensor, const std::weak_ptr<PagedModel>& owner, std::int32_t block) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  c10::StorageImpl* const implementation = storage.unsafeGetStorageImpl();
  if (withheld_of(*implementation) == nullptr) {
    auto withheld = c10::make_intrusive<Withheld>();
    withheld->owner = owner;
    withheld->block = block;
    withheld->memory = implementation->set_data_ptr(c10::DataPtr());
    Withheld* const context = withheld.release();
    implementation->set_data_ptr_noswap({nullptr, context, &release_withheld, c10::Device(c10::kCPU)});
    implementation->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "hydra_ext: an optimizer step is writing this tensor now; operations wait for it, raw access cannot. Call "
        "run.sync() first");
  }
  add_fault_key(*tensor.unsafeGetTensorImpl());
  return {tensor, storage};
}

void give_back(const WithheldTensor& withheld) noexcept {
  c10::StorageImpl* const implementation = withheld.storage.unsafeGetStorageImpl();
  if (Withheld* const context = withheld_of(*implementation)) {
    implementation->clear_data_ptr_access_error_msg_();
    implementation->set_data_ptr_noswap(std::exchange(context->memory, c10::DataPtr()));
  }
  remove_fault_key(*withheld.tensor.unsafeGetTensorImpl());
}

}  // namespace hydra
