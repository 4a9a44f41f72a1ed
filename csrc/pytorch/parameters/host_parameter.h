// A host parameter and its device face: the user's own CPU Parameter, which stays the truth, and the paged
// leaf that the forward sees.
//
// The pair watches for changes of the host's bytes: by version counter, by address, and by a fingerprint of
// sampled cache lines for writers that bump no version (`.data`, numpy). A change that the version counter
// shows is passed on to the face's counter, so that autograd raises for a saved face what it would raise for
// a saved host parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>

#include "csrc/pytorch/memory/arena_region.h"
#include "csrc/pytorch/memory/host_buffers.h"
#include "csrc/pytorch/parameters/page.h"

namespace hydra {

/// What is known of a parameter's gradient: whether backward has brought a part of it since it was last settled, and
/// whether it is settled, so that nothing may be added to it before the window closes.
enum class GradientState : std::uint8_t { kUnchanged, kArrived, kSettled };

/// Host memory.
struct HostExtent {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  bool overlaps(const HostExtent& other) const noexcept { return begin < other.end && other.begin < end; }
};

struct HostParameter {
  std::string name;
  at::Tensor host;
  at::Tensor face;
  at::Tensor paged;                        // what the face's data is, whatever the forward makes of the face
  at::ScalarType host_dtype = at::kFloat;  // the host's when the context was entered
  PagePtr page;
  bool adopted = false;  // the host's bytes lie in the arena

  // The bytes that the host had when they were withheld, or that they went to the disk; and the storage they were of.
  std::byte* withheld_data = nullptr;
  bool went_to_disk = false;
  c10::Storage withheld_storage;

  // What the host was when its bytes were last known to be those of the face.
  std::uint32_t version_seen = 0;
  const void* data_seen = nullptr;
  bool trained_seen = false;  // whether both required gradients when the window opened
  std::uint64_t fingerprint_seen = 0;
  std::atomic<bool> moved{false};  // an optimizer has written it since, or is about to

  std::shared_ptr<void> diversion;  // of gradients that the host's own graph computes
  std::atomic<GradientState> gradient_state{GradientState::kUnchanged};
  c10::Storage gradient_storage;  // kept for reuse; others hold it while its count is above one

  // Where gradients go to the disk: their memory comes from here, and nothing of it is kept.
  std::shared_ptr<HostBuffers> gradient_buffers;
  c10::weak_intrusive_ptr<c10::StorageImpl> lent_gradient{c10::intrusive_ptr<c10::StorageImpl>()};

  Bytes face_bytes() const { return static_cast<Bytes>(face.nbytes()); }
  Bytes host_bytes() const { return static_cast<Bytes>(host.nbytes()); }
  /// Of the host's bytes; empty where host_data() is null.
  HostExtent extent() const;
  /// Null where the host was given bytes that another tensor's withholding has taken away.
  std::byte* host_data() const;
  /// Whether the host has no bytes now: a step is writing them or the device is their home, and it was given no
  /// others.
  bool withheld() const;
  /// Whether its home is the disk, and it was given no others.
  bool on_disk() const { return went_to_disk && withheld(); }
  /// The host's bytes are about to be withheld, to go to the disk if so, or have been given back.
  void note_withheld(bool to_disk = false);
  void note_given_back();
  /// As the latter, with bytes whose changes are known.
  void note_came_home();
  /// A step of the optimizer is about to write the host: every slot's bytes are older, and its version is known.
  void note_moved();
  /// What a write to it may change: its own bytes, or those of its storage. Empty where it has none at hand.
  HostExtent reach() const;
  /// Whether its storage may be that of other tensors too.
  bool shares() const { return host.storage().use_count() > 1; }
  /// Whether its memory may be that of other tensors too, under its storage or another one.
  bool may_overlap() const { return !adopted || shares(); }
  std::uint32_t version() const;
  bool same_dtype() const { return host.scalar_type() == face.scalar_type(); }

  /// Whether the face was given other data (`.data = ...`).
  bool detached() const { return page_of(face) != page.get(); }
  void attach() { face.set_data(paged); }

  /// Empty when the host still is what the face was made for (dtype, shape, strides, device), else what differs.
  std::string mismatch() const;
  /// Whether the host's bytes changed since note_seen(); passes version bumps on to the face. Of bytes that are
  /// withheld only the version, and whether they are moved, is looked at, here and in note_seen(); those of others
  /// count as changed.
  bool changed_since_seen();
  void note_seen();
  /// Whether this `.grad` may go to the disk as it is.
  bool lent(const at::Tensor& gradient) const;
  /// A host tensor of the host's dtype laid out like `gradient`: in the kept storage if it is held nowhere else,
  /// else in fresh memory of `arena`, or of `gradient_buffers`.
  at::Tensor gradient_buffer(const at::Tensor& gradient, const std::shared_ptr<HostArena>& arena);
};

/// Its `.grad` itself, to be looked at, exchanged or set.
inline at::Tensor& gradient_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->mutable_grad(); }

/// Whether the parameter can be paged; empty if so, else the reason.
std::string why_not_pageable(const at::Tensor& host);

/// Moves the host's bytes to `offset` in `region`, under the storage it has, so that every alias follows.
/// False (and nothing changed) when others share the storage and may hold raw pointers into it.
bool adopt_into(const at::Tensor& host, const ArenaRegionPtr& region, Bytes offset);

}  // namespace hydra
