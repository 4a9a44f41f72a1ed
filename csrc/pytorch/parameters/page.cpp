#include "csrc/pytorch/parameters/page.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "csrc/pytorch/parameters/fault_key.h"

namespace hydra {

namespace {

/// The deleter of our storages, which identifies them. Drops the data pointer's reference.
void release_page(void* context) { auto page = PagePtr::reclaim(static_cast<Page*>(context)); }

c10::DataPtr pointer_for(Page& page, void* data) {
  auto reference = c10::intrusive_ptr<Page>::reclaim_copy(&page);
  return {data, reference.release(), &release_page, page.device};
}

}  // namespace

Page* page_of(const c10::StorageImpl& storage) noexcept {
  auto& pointer = const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &release_page ? static_cast<Page*>(pointer.get_context()) : nullptr;
}

Page* page_of(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return nullptr;
  }
  return page_of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

at::Tensor make_paged_tensor(const PagePtr& page, const at::Tensor& host, at::ScalarType dtype) {
  const auto nbytes = static_cast<std::int64_t>(
      at::detail::computeStorageNbytes(host.sizes(), host.strides(), c10::elementSize(dtype)));
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(nbytes),
                                            pointer_for(*page, nullptr), /*allocator=*/nullptr, /*resizable=*/false);
  page->storage = storage.get();
  withdraw(*page, "has not been fetched yet");
  const auto backend = page->device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(backend).add(kFaultKey), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  return tensor;
}

void publish(Page& page, void* data) noexcept {
  page.storage->clear_data_ptr_access_error_msg_();
  page.storage->set_data_ptr_noswap(pointer_for(page, data));
}

void withdraw(Page& page, const char* reason) noexcept {
  page.storage->set_data_ptr_noswap(pointer_for(page, nullptr));
  page.storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "hydra_ext: the device parameter '" + page.name + "' is not on the device now: it " + reason +
      ". Read the model's own (host) parameter instead, or read it inside the model's forward.");
}

}  // namespace hydra
