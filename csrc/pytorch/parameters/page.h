// A page: the storage of one device parameter, whose bytes come and go.
//
// The storage keeps its identity, size and device; only its data pointer changes. Absent, the pointer is null
// and every access raises our message. A storage is recognised by its deleter and leads to its page through
// the deleter's context, in O(1). The storage holds a reference to the page, so that a page outlives whatever
// the user keeps: a retained graph, a view, the parameter itself.
//
// Threads: publish and withdraw under the pager's lock; page_of from anywhere.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

#include "csrc/base/types.h"

namespace hydra {

class PagedModel;

/// What to pin, and through which model. Weak: a context that has ended leaves pages behind that can only raise.
struct Page final : c10::intrusive_ptr_target {
  std::weak_ptr<PagedModel> owner;
  std::int32_t block = -1;
  Bytes offset = 0;                     // in the block's slot
  std::string name;                     // the parameter's, for messages
  c10::StorageImpl* storage = nullptr;  // not owned: the face keeps it
  bool written = false;                 // in place, since the last write-back
  std::int64_t silent_writes = 0;       // changes of the host that no version counter showed
  c10::Device device = c10::Device(c10::kCPU);
};

using PagePtr = c10::intrusive_ptr<Page>;

/// The page behind a storage, or null for every other storage.
Page* page_of(const c10::StorageImpl& storage) noexcept;
/// The page behind a tensor, or null.
Page* page_of(const at::Tensor& tensor) noexcept;

/// A leaf tensor like `host` (sizes, strides) with a paged, absent storage on `page->device`.
at::Tensor make_paged_tensor(const PagePtr& page, const at::Tensor& host, at::ScalarType dtype);

void publish(Page& page, void* data) noexcept;
void withdraw(Page& page, const char* reason) noexcept;

}  // namespace hydra
