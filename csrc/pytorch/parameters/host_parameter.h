// A host parameter and its device face: the user's own CPU Parameter, which stays the truth, and the paged
// leaf that the forward sees.
//
// The pair detects changes of the host's bytes by the version counter and the address. A fingerprint of sampled cache
// lines detects writers that bump no version (`.data`, numpy). A bump of the host's version counter is passed on to the
// face's counter, so that autograd raises for a saved face as it would for a saved host parameter.
//
// Owns references to both tensors. Threads: one at a time, except for the atomic members. Sizes are bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>

#include "csrc/pytorch/memory/arena_region.h"
#include "csrc/pytorch/memory/host_buffers.h"
#include "csrc/pytorch/parameters/page.h"

namespace hydra {

/// The state of a parameter's gradient: whether backward has brought a part of it since it was last settled. Nothing
/// may be added to a settled gradient before the window closes.
enum class GradientState : std::uint8_t { kUnchanged, kArrived, kSettled };

/// A range of host memory.
struct HostExtent {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  bool overlaps(const HostExtent& other) const noexcept { return begin < other.end && other.begin < end; }
};

struct HostParameter {
  std::string name;
  at::Tensor host;
  at::Tensor face;
  at::Tensor paged;                        // the face's paged data; attach() restores it after `face.data = ...`
  at::ScalarType host_dtype = at::kFloat;  // the host's dtype when the context was entered
  PagePtr page;
  bool adopted = false;  // the host's bytes lie in the arena

  // The bytes that the host had when they were withheld, or whether they went to the disk, and their storage.
  std::byte* withheld_data = nullptr;
  bool went_to_disk = false;
  c10::Storage withheld_storage;

  // The host's state when its bytes were last known to equal the face's.
  std::uint32_t version_seen = 0;
  const void* data_seen = nullptr;
  bool trained_seen = false;  // whether both required gradients when the window opened
  std::uint64_t fingerprint_seen = 0;
  std::atomic<bool> moved{false};  // an optimizer has written the host since, or is about to

  std::shared_ptr<void> diversion;  // takes the gradients that the host's own graph computes
  std::atomic<GradientState> gradient_state{GradientState::kUnchanged};
  c10::Storage gradient_storage;  // kept for reuse; has other owners while its count is above one

  // The source of memory for gradients that go to the disk. That memory is not kept.
  std::shared_ptr<HostBuffers> gradient_buffers;
  c10::weak_intrusive_ptr<c10::StorageImpl> lent_gradient{c10::intrusive_ptr<c10::StorageImpl>()};

  Bytes face_bytes() const { return static_cast<Bytes>(face.nbytes()); }
  Bytes host_bytes() const { return static_cast<Bytes>(host.nbytes()); }
  /// The extent of the host's bytes; empty if host_data() is null.
  HostExtent extent() const;
  /// The host's bytes. Null if the host shows the storage of another tensor that is withheld.
  std::byte* host_data() const;
  /// Whether the host's bytes are withheld, and the user has not given it others: a step is writing them, or their home
  /// is the device or the disk.
  bool withheld() const;
  /// Whether the home of the host's bytes is the disk, and the user has not given it others.
  bool on_disk() const { return went_to_disk && withheld(); }
  /// Tells that the host's bytes are about to be withheld, and whether they go to the disk.
  void note_withheld(bool to_disk = false);
  /// Tells that the host's bytes have been returned.
  void note_given_back();
  /// Tells that the host's bytes have been returned, and that all changes to them are known.
  void note_came_home();
  /// Tells that an optimizer step is about to write the host: slots then have older bytes. The present version counts
  /// as seen.
  void note_moved();
  /// The bytes that a write to the host may change: all bytes of its storage, or, while withheld, its own bytes. Empty
  /// if the host has none in memory.
  HostExtent reach() const;
  /// Whether other tensors may have the host's storage too.
  bool shares() const { return host.storage().use_count() > 1; }
  /// Whether other tensors may have the host's memory too, under its storage or another one.
  bool may_overlap() const { return !adopted || shares(); }
  std::uint32_t version() const;
  bool same_dtype() const { return host.scalar_type() == face.scalar_type(); }

  /// Whether the user has given the face other data (`.data = ...`).
  bool detached() const { return page_of(face) != page.get(); }
  void attach() { face.set_data(paged); }

  /// Describes how the host differs from the face in dtype, shape, strides or device; empty if it does not.
  std::string mismatch() const;
  /// Whether the host's bytes have changed since note_seen(); passes version bumps on to the face. While the bytes are
  /// withheld, this and note_seen() use only the version and `moved`. A host whose bytes another tensor's withholding
  /// has taken away counts as changed.
  bool changed_since_seen();
  void note_seen();
  /// Whether this `.grad` is in memory of `gradient_buffers`, so that it may go to the disk as it is.
  bool lent(const at::Tensor& gradient) const;
  /// Returns a host tensor of the host's dtype, laid out like `gradient`. Uses memory of `gradient_buffers` for
  /// gradients that can go to the disk, else the kept storage if it has no other owner, else fresh memory of `arena`.
  at::Tensor gradient_buffer(const at::Tensor& gradient, const std::shared_ptr<HostArena>& arena);
};

/// The tensor's `.grad` itself, to be read, exchanged or set.
inline at::Tensor& gradient_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->mutable_grad(); }

/// Copies numbers that an operation is about to overwrite.
at::Tensor numbers_on_host(const at::Tensor& tensor);

/// Returns the reason why the parameter cannot be paged, or an empty string if it can.
std::string why_not_pageable(const at::Tensor& host);

/// Moves the host's bytes to `offset` in `region`, under its present storage, so that every alias follows.
/// Returns false, and changes nothing, if the storage has other owners, which may have raw pointers into it.
bool adopt_into(const at::Tensor& host, const ArenaRegionPtr& region, Bytes offset);

}  // namespace hydra
