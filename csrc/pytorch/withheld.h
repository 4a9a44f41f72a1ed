// Host tensors whose bytes somebody is writing: their storages have none until that is done.
//
// A withheld tensor carries the fault key, so that an operation on it waits; raw access (numpy, data_ptr, saving)
// raises. Storage, tensor, version and aliases stay what they are: only the data pointer is away, in the storage's
// own place for it.
// Threads: withhold() and give_back() by one thread at a time for one tensor; withheld_of() from anywhere.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "csrc/base/types.h"

namespace hydra {

class PagedModel;

struct Withheld final : c10::intrusive_ptr_target {
  std::weak_ptr<PagedModel> owner;
  std::int32_t block = -1;  // whose update it waits for
  c10::DataPtr memory;      // the storage's own
};

/// What withholds a tensor's bytes, or null.
Withheld* withheld_of(const at::Tensor& tensor) noexcept;

/// A tensor, and the storage that it had: somebody may give it another meanwhile (`.data = ...`).
struct WithheldTensor {
  at::Tensor tensor;
  c10::Storage storage;
};

/// Takes the bytes away, until give_back(); of a storage that is withheld already nothing more.
WithheldTensor withhold(const at::Tensor& tensor, const std::weak_ptr<PagedModel>& owner, std::int32_t block);
void give_back(const WithheldTensor& withheld) noexcept;

}  // namespace hydra
