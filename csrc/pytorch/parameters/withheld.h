// Host tensors whose bytes are elsewhere: an optimizer step is writing them, or their home is the device or the disk.
// Their storages have none until they are given back.
//
// A withheld tensor carries the fault key, so that an operation on it waits; raw access (numpy, data_ptr, saving)
// raises. Storage, tensor, version and aliases stay what they are: only the data pointer is away, in the storage's
// own place for it.
// Threads: any; withhold() and give_back() by one thread at a time for one tensor. An operation that began before
// withhold(), in another thread, goes on with the bytes it found: it may see them change, or read them when they are
// freed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "csrc/base/types.h"

namespace hydra {

class PagedModel;

struct Withheld final : c10::intrusive_ptr_target {
  std::weak_ptr<PagedModel> owner;
  std::int32_t block = -1;       // whose tensor it is
  c10::DataPtr memory;           // the storage's own; may be null where the home is elsewhere
  std::byte* at_home = nullptr;  // the bytes on the device, where the home is that
};

using WithheldPtr = c10::intrusive_ptr<Withheld>;

/// What withholds a tensor's, or a storage's, bytes, or null. Another thread may give them back at any time.
WithheldPtr withheld_of(const at::Tensor& tensor);
WithheldPtr withheld_of(const c10::Storage& storage);

/// A tensor, and the storage that it had: the user may give it another meanwhile (`.data = ...`).
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
/// Its home is the disk from now on: gives the bytes that it had on the host.
c10::DataPtr note_on_disk(const WithheldTensor& withheld) noexcept;
/// Whether Python has a wrapper of the storage and does not refer to it: a reference, though nothing looks into the
/// bytes. Takes the interpreter lock.
bool has_idle_wrapper(const c10::Storage& storage);
/// References to the storage, but for that one. Takes the interpreter lock.
std::size_t references_to(const c10::Storage& storage);
/// Whether the storage's memory is lent to torch, by an array of numpy's say, or shared between processes: others may
/// look into it at any time. Not of withheld ones.
bool is_lent(const c10::Storage& storage);
/// Whether nothing else knows the tensor's bytes, an array of numpy's say, which would not see them change any more.
/// Takes the interpreter lock.
bool is_alone(const at::Tensor& tensor);
/// Whether it is all of a storage that has its bytes on the host, with other owners or without.
bool is_whole(const at::Tensor& tensor);
/// Whether the tensor, which may be undefined, has this storage.
bool shows(const at::Tensor& tensor, const c10::Storage& storage) noexcept;
/// The tensor's bytes on the device, if their home is there; else null.
void* home_data(const at::Tensor& tensor);
void give_back(const WithheldTensor& withheld) noexcept;
/// The bytes are lost: it stays withheld for ever, and says so.
void give_up(const WithheldTensor& withheld) noexcept;

}  // namespace hydra
