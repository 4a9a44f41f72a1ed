// Derived pages: the low-precision copies that autocast makes of device parameters. Their bytes can be dropped.
//
// Autograd saves such a copy for backward, and autocast caches it for the region. So the whole model would stay on the
// device in low precision. A derived page drops the copy's bytes when the pass leaves the site that made it, and casts
// them again when an operation needs them: in the same storage, to the same bits. The graph stays as autocast built it,
// and so does the order of every sum.
//
// A copy that is written in place no longer depends on its parameter only, so its bytes are kept from then on. A copy
// whose parameter has changed cannot be cast again; an operation on it raises.
// On a GPU an operation on another stream than that of the cast waits for the cast, and its memory is not used again
// before that operation has ended.
// The copy's storage owns the page. Threads: any. Each page's mutex is held while it casts; no thread waits for it with
// the interpreter lock held.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <optional>
#include <vector>

#include "csrc/pytorch/parameters/page.h"

namespace hydra {

class DerivedPage final : public c10::intrusive_ptr_target {
 public:
  DerivedPage(const at::Tensor& parameter, const Page& page, const at::Tensor& copy);

  std::int32_t block() const noexcept { return block_; }
  /// Takes the copy's memory out of its storage. Called once, before all other methods.
  void take_over();
  /// Makes the bytes present and keeps them until unpin().
  void pin(bool written);
  void unpin() noexcept;
  /// Drops the bytes now, or at the last unpin(). Returns true only if they were dropped now.
  bool drop() noexcept;
  /// Called after the last owner. Frees the bytes, which would otherwise stay as long as weak references.
  void release_resources() override;

 private:
  c10::DataPtr pointer() noexcept;
  void cast();
  /// Notes that the calling thread has enqueued the cast.
  void note_cast();
  /// Makes the calling thread's stream wait for the cast.
  void follow_cast();
  void drop_locked() noexcept;

  std::mutex mutex_;
  at::Tensor parameter_;  // the detached face
  std::uint32_t version_;
  std::int64_t silent_writes_;
  std::string name_;
  std::int32_t block_;
  c10::StorageImpl* storage_;  // the copy's storage, which owns this page through its data pointer
  struct Cast {
    c10::Stream stream;
    c10::Event end;
  };
  /// The copy's bytes.
  struct Memory {
    c10::DataPtr data;
    std::optional<Cast> cast;  // null on the CPU
  };
  Memory memory_;
  at::Tensor shape_;  // the copy's dtype, sizes and strides, on the meta device
  std::int32_t pins_ = 0;
  bool drop_at_unpin_ = false;
  bool kept_ = false;
};

using DerivedPagePtr = c10::intrusive_ptr<DerivedPage>;

/// Returns the derived page behind a tensor, or null.
DerivedPage* derived_page_of(const at::Tensor& tensor) noexcept;
/// Turns `copy`, just cast from the paged `parameter`, into a derived page. Returns null if its storage is shared.
DerivedPagePtr derive(const at::Tensor& parameter, const Page& page, const at::Tensor& copy);

/// The derived pages of one model. Refers to them weakly. Thread-safe.
class DerivedPages {
 public:
  void add(const DerivedPagePtr& page);
  /// Drops the pages of one block. Returns the number of pages that have dropped bytes.
  std::int64_t drop(std::int32_t block) noexcept;

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<DerivedPage>> pages_;
};

}  // namespace hydra
