#include "csrc/pytorch/parameters/derived_page.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "csrc/pytorch/parameters/fault_key.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

void release_derived(void* context) { auto page = DerivedPagePtr::reclaim(static_cast<DerivedPage*>(context)); }

std::uint32_t version_of(const at::Tensor& tensor) {
  return static_cast<std::uint32_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

}  // namespace

DerivedPage::DerivedPage(const at::Tensor& parameter, const Page& page, const at::Tensor& copy)
    : parameter_(parameter.detach()),
      version_(version_of(parameter)),
      silent_writes_(page.silent_writes),
      name_(page.name),
      block_(page.block),
      storage_(copy.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()),
      shape_(at::empty_strided(copy.sizes(), copy.strides(), copy.options().device(at::kMeta))) {}

c10::DataPtr DerivedPage::pointer() noexcept {
  auto reference = c10::intrusive_ptr<DerivedPage>::reclaim_copy(this);
  return {memory_.data.get(), reference.release(), &release_derived, parameter_.device()};
}

void DerivedPage::pin(bool written) {
  const auto lock = lock_without_gil(mutex_);
  if (!memory_.data) {
    cast();
  }
  follow_cast();
  kept_ = kept_ || written;
  ++pins_;
}

void DerivedPage::unpin() noexcept {
  const auto lock = lock_without_gil(mutex_);
  --pins_;
  if (drop_at_unpin_) {
    drop_locked();
  }
}

bool DerivedPage::drop() noexcept {
  const auto lock = lock_without_gil(mutex_);
  if (!memory_.data || kept_) {
    return false;
  }
  drop_at_unpin_ = true;
  drop_locked();
  return !memory_.data;
}

void DerivedPage::release_resources() {
  const std::lock_guard lock(mutex_);
  memory_.data = c10::DataPtr();
  parameter_.reset();
}

void DerivedPage::drop_locked() noexcept {
  if (pins_ > 0 || kept_) {
    return;
  }
  drop_at_unpin_ = false;
  const c10::DataPtr gone = std::exchange(memory_.data, c10::DataPtr());  // a moved-from pointer keeps its address
  storage_->set_data_ptr_noswap(pointer());
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "hydra_ext: the low-precision copy of '" + name_ + "' is not on the device now; use it inside the forward");
}

void DerivedPage::cast() {
  const Page* page = page_of(parameter_);
  const bool same = version_of(parameter_) == version_ && page != nullptr && page->silent_writes == silent_writes_;
  TORCH_CHECK(same, "hydra_ext: backward, or an autocast region, needs the ", shape_.scalar_type(), " copy of '", name_,
              "' made before the parameter was changed. End the autocast "
              "region before optimizer.step(), and run backward before the weights change");
  const c10::DeviceGuard guard(parameter_.device());  // the operation's own guard comes later
  c10::DataPtr memory = storage_->allocator()->allocate(storage_->nbytes());
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor copy =
        at::from_blob(memory.get(), shape_.sizes(), shape_.strides(), shape_.options().device(parameter_.device()));
    copy.copy_(parameter_);
  }
  // After the copy, which may throw: the next operation must not read undefined bytes.
  memory_.data = std::move(memory);
  note_cast();
  storage_->clear_data_ptr_access_error_msg_();
  storage_->set_data_ptr_noswap(pointer());
}

void DerivedPage::note_cast() {
  const c10::Device device = parameter_.device();
  if (device.is_cpu()) {
    return;
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  memory_.cast.emplace(Cast{.stream = stream, .end = c10::Event(device.type())});
  memory_.cast->end.record(stream);
}

void DerivedPage::follow_cast() {
  if (!memory_.cast) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(memory_.cast->stream.device_type());
  const c10::Stream reader = guard.getStream(memory_.cast->stream.device());
  if (reader != memory_.cast->stream) {
    memory_.cast->end.block(reader);
    guard.recordDataPtrOnStream(memory_.data, reader);
  }
}

DerivedPage* derived_page_of(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return nullptr;
  }
  auto& pointer = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &release_derived ? static_cast<DerivedPage*>(pointer.get_context()) : nullptr;
}

DerivedPagePtr derive(const at::Tensor& parameter, const Page& page, const at::Tensor& copy) {
  c10::StorageImpl* storage = copy.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (copy.unsafeGetTensorImpl()->unsafe_storage().use_count() != 1 || storage->allocator() == nullptr ||
      copy.storage_offset() != 0 || page_of(copy) != nullptr) {
    return nullptr;
  }
  auto derived = c10::make_intrusive<DerivedPage>(parameter, page, copy);
  derived->take_over();
  add_fault_key(*copy.unsafeGetTensorImpl());
  return derived;
}

void DerivedPage::take_over() {
  memory_.data = storage_->set_data_ptr(c10::DataPtr());
  note_cast();
  storage_->set_data_ptr_noswap(pointer());
}

void DerivedPages::add(const DerivedPagePtr& page) {
  const std::lock_guard lock(mutex_);
  std::erase_if(pages_, [](const auto& known) { return known.expired(); });
  pages_.emplace_back(page);
}

std::int64_t DerivedPages::drop(std::int32_t block) noexcept {
  std::vector<DerivedPagePtr> live;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& known : pages_) {
      if (DerivedPagePtr page = known.lock(); page && page->block() == block) {
        live.push_back(std::move(page));
      }
    }
  }
  std::int64_t dropped = 0;
  for (const DerivedPagePtr& page : live) {
    dropped += page->drop() ? 1 : 0;
  }
  return dropped;
}

}  // namespace hydra
