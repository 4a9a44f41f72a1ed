// Withheld host tensors: an optimizer step is writing their bytes, or the bytes' home is the device or the disk.
// Their storages have no bytes until give_back().
//
// A withheld tensor carries the fault key, so that an operation on it waits. Raw access (numpy, data_ptr, saving)
// raises. Storage, tensor, version and aliases stay the same. Only the data pointer is taken: the storage's context
// keeps it.
// Threads: any; one thread at a time calls withhold() and give_back() for a tensor. An operation that began before
// withhold(), in another thread, continues with the bytes it found: it may see them change, or read freed memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "csrc/base/types.h"

namespace hydra {

class PagedModel;

struct Withheld final : c10::intrusive_ptr_target {
  std::weak_ptr<PagedModel> owner;
  std::int32_t block = -1;       // the block of the tensor
  c10::DataPtr memory;           // the storage's own memory; may be null if the home is elsewhere
  std::byte* at_home = nullptr;  // the bytes on the device, if their home is the device
};

using WithheldPtr = c10::intrusive_ptr<Withheld>;

/// Returns the object that withholds the bytes of a tensor, or of a storage, or null. Another thread may return the
/// bytes at any time.
WithheldPtr withheld_of(const at::Tensor& tensor);
WithheldPtr withheld_of(const c10::Storage& storage);

/// A tensor, and its storage when it was withheld: the user may give it another one later (`.data = ...`).
struct WithheldTensor {
  at::Tensor tensor;  // undefined if only the storage is still known
  c10::Storage storage;
};

/// Takes the storage's bytes until give_back(), unless the storage is withheld already. Gives the tensor the fault key.
/// `at_home` is the address of the storage's bytes on the device, if their home is the device.
WithheldTensor withhold(const at::Tensor& tensor, const std::weak_ptr<PagedModel>& owner, std::int32_t block,
                        std::byte* at_home = nullptr);
/// Makes a host tensor with the sizes and strides of `like`, and without bytes of its own. The first give_back() gives
/// it `memory`.
at::Tensor make_withheld(const at::Tensor& like, const std::weak_ptr<PagedModel>& owner, std::int32_t block,
                         std::byte* at_home);
/// Tells that the bytes' home is the disk from now on. Returns the memory that they had on the host.
c10::DataPtr note_on_disk(const WithheldTensor& withheld) noexcept;
/// Whether Python has a wrapper of the storage that it no longer refers to. The wrapper counts as a reference, although
/// it reads no bytes. Takes the interpreter lock.
bool has_idle_wrapper(const c10::Storage& storage);
/// The number of references to the storage, without an idle wrapper. Takes the interpreter lock.
std::size_t references_to(const c10::Storage& storage);
/// Whether the storage's memory is lent to torch, such as by a numpy array, or shared between processes: other code may
/// read it at any time. False for withheld storages.
bool is_lent(const c10::Storage& storage);
/// Whether the tensor's bytes have no other owner, such as a numpy array, which would not see later changes.
/// Takes the interpreter lock.
bool is_alone(const at::Tensor& tensor);
/// Whether the tensor is all of a storage that has its bytes on the host, with or without other owners.
bool is_whole(const at::Tensor& tensor);
/// Whether the tensor, which may be undefined, has this storage.
bool shows(const at::Tensor& tensor, const c10::Storage& storage) noexcept;
/// Returns the address of the tensor's bytes on the device, or null if their home is not the device.
void* home_data(const at::Tensor& tensor);
/// Returns the storage's bytes, and removes the tensor's fault key.
void give_back(const WithheldTensor& withheld) noexcept;
/// Tells that the bytes are lost: the storage stays withheld for ever, and its access message says so.
void give_up(const WithheldTensor& withheld) noexcept;

}  // namespace hydra
