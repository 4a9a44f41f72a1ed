// Host tensors whose bytes are elsewhere: an optimizer step is writing them, or their home is the device. Their
// storages have none until they are given back.
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
  std::int32_t block = -1;       // whose update it waits for
  c10::DataPtr memory;           // the storage's own; may be null where the home is the device
  std::byte* at_home = nullptr;  // the bytes on the device, where the home is that
};

/// What withholds a tensor's, or a storage's, bytes, or null.
Withheld* withheld_of(const at::Tensor& tensor) noexcept;
Withheld* withheld_of(const c10::Storage& storage) noexcept;

/// A tensor, and the storage that it had: somebody may give it another meanwhile (`.data = ...`).
struct WithheldTensor {
  at::Tensor tensor;  // may be undefined: only the storage is known any more
  c10::Storage storage;
};

/// Takes the bytes away, until give_back(); of a storage that is withheld already nothing more. `at_home`: where the
/// storage's bytes are on the device, if that is their home.
WithheldTensor withhold(const at::Tensor& tensor, const std::weak_ptr<PagedModel>& owner, std::int32_t block,
                        std::byte* at_home = nullptr);
/// A host tensor that lies as `like` does and never had bytes of its own; the first give_back() gives it `memory`.
at::Tensor make_withheld(const at::Tensor& like, const std::weak_ptr<PagedModel>& owner, std::int32_t block,
                         std::byte* at_home);
/// The tensor's bytes on the device, if their home is there; else null.
void* home_data(const at::Tensor& tensor) noexcept;
void give_back(const WithheldTensor& withheld) noexcept;

}  // namespace hydra
