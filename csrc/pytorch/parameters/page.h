// A page: the storage of one device parameter, whose bytes come and go.
//
// The storage keeps its identity, size and device; only its data pointer changes. While the page is absent, the pointer
// is null and every access raises our message. A storage is recognised by its deleter, whose context is its page: a
// look-up in O(1). The storage holds a reference to the page, so that the page lives as long as any tensor that the
// user keeps: a retained graph, a view, the parameter itself.
//
// Threads: publish() and withdraw() under the pager's lock; page_of() on any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

#include "csrc/base/types.h"

namespace hydra {

class PagedModel;

/// The block to pin, and the model that pins it. The reference to the model is weak: pages that outlive their context
/// can only raise.
struct Page final : c10::intrusive_ptr_target {
  std::weak_ptr<PagedModel> owner;
  std::int32_t block = -1;
  Bytes offset = 0;                     // in the block's slot
  std::string name;                     // the parameter's name, for messages
  c10::StorageImpl* storage = nullptr;  // not owned: the face keeps it
  bool written = false;                 // written in place since the last write-back
  std::int64_t silent_writes = 0;       // changes of the host that no version counter has shown
  c10::Device device = c10::Device(c10::kCPU);
};

using PagePtr = c10::intrusive_ptr<Page>;

/// Returns the page behind a storage, or null if the storage is not paged.
Page* page_of(const c10::StorageImpl& storage) noexcept;
/// Returns the page behind a tensor, or null.
Page* page_of(const at::Tensor& tensor) noexcept;

/// Makes a leaf tensor with the sizes and strides of `host`, and a paged, absent storage on `page->device`.
at::Tensor make_paged_tensor(const PagePtr& page, const at::Tensor& host, at::ScalarType dtype);

/// Makes the bytes at `data` the storage's.
void publish(Page& page, void* data) noexcept;
/// Makes the page absent. `reason` completes the sentence "it ..." in the message of an access.
void withdraw(Page& page, const char* reason) noexcept;

}  // namespace hydra
