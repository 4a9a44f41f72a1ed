// Low-precision copies that autocast makes of device parameters, kept droppable.
//
// Autograd saves such a copy for backward and autocast caches it for the region, so that the whole model in low
// precision would stay on the device. A derived page lets the copy's bytes go when the site that made it is left
// and casts them anew from the parameter when an operation needs them again: same storage, same bits. The graph,
// and with it every sum, stays as autocast built it.
//
// A copy that is written to in place is no longer a function of its parameter: it is kept from then on. One whose
// parameter was changed since cannot be cast anew; that raises.
// Threads: any; each page has a mutex, which is held while it casts: with the interpreter lock held no thread waits
// for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <vector>

#include "csrc/pytorch/parameters/page.h"

namespace hydra {

class DerivedPage final : public c10::intrusive_ptr_target {
 public:
  DerivedPage(const at::Tensor& parameter, const Page& page, const at::Tensor& copy);

  std::int32_t block() const noexcept { return block_; }
  /// Takes the copy's memory out of its storage; once, before anything else.
  void take_over();
  /// Makes the bytes present and keeps them until unpin().
  void pin(bool written);
  void unpin() noexcept;
  /// Lets the bytes go, now or at the last unpin. False if they stay or are gone already.
  bool drop() noexcept;
  /// The last owner is gone; without this the bytes would stay for as long as there are weak references.
  void release_resources() override;

 private:
  c10::DataPtr pointer() noexcept;
  void cast();
  void drop_locked() noexcept;

  std::mutex mutex_;
  at::Tensor parameter_;  // the face, detached
  std::uint32_t version_;
  std::int64_t silent_writes_;
  std::string name_;
  std::int32_t block_;
  c10::StorageImpl* storage_;  // the copy's; it owns this page through its data pointer
  c10::DataPtr memory_;
  at::Tensor shape_;  // the copy's dtype, sizes and strides, on the meta device
  std::int32_t pins_ = 0;
  bool drop_at_unpin_ = false;
  bool kept_ = false;
};

using DerivedPagePtr = c10::intrusive_ptr<DerivedPage>;

/// The derived page behind a tensor, or null.
DerivedPage* derived_page_of(const at::Tensor& tensor) noexcept;
/// Turns `copy`, just cast from the paged `parameter`, into a derived page. Null when its storage is shared.
DerivedPagePtr derive(const at::Tensor& parameter, const Page& page, const at::Tensor& copy);

/// The derived pages of one model, by block. Thread-safe.
class DerivedPages {
 public:
  void add(const DerivedPagePtr& page);
  /// Drops those of one block. Returns how many let bytes go.
  std::int64_t drop(std::int32_t block) noexcept;

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<DerivedPage>> pages_;
};

}  // namespace hydra
