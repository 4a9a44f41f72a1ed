// What autograd saves for backward, kept off the device until backward comes for it.
//
// pack() and unpack() are the two halves of a hook on saved tensors. Tensors saved from one part of a storage share it
// (stash_books.h). Such intervals leave on the lane to the host as they are saved, the oldest first, and come back in
// the reverse order, ahead of a backward that has begun to ask for them. Of what the stash holds on the device it keeps
// the newest, up to its budget; once a pass has been seen, what will fit to its end does not leave at all. What forward
// and backward hold themselves comes on top.
//
// What unpack() gives has the bytes, sizes, strides, dtype and alignment of what pack() was given, and counts versions
// with it: if that was written to since, unpack() raises what torch raises. What cannot be moved is handed back as it
// was: parameters and their views, what is protected, less than kLeastBytes, other layouts, other devices.
//
// Ownership: a SavedTensor owns its share; with the last one an interval's memory goes, here and on the host, at once
// or when the transfer under way has ended. Graphs may outlive close().
// Threads: any. Nothing waits, allocates or frees with the books' mutex held; waits are without the interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "csrc/pytorch/host_buffers.h"
#include "csrc/pytorch/stash_books.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

/// What becomes of tensors that the calling thread saves.
enum class Treatment : std::uint8_t { kMove, kKeep };

/// Until the matching end_treatment(), on this thread; they nest.
void begin_treatment(Treatment treatment);
void end_treatment() noexcept;

/// What pack() hands to autograd.
class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);

  VersionMark mark() const noexcept;
  /// Throws c10::Error, as torch does, if the tensor was written to since.
  void expect_unchanged() const;
  /// Over device memory that has the interval from `begin` on.
  at::Tensor over(const c10::Storage& storage, Bytes begin) const;

 private:
  friend class Stash;
  at::Tensor kept_;  // if it was not moved
  StashedIntervalPtr interval_;
  bool taken_ = false;  // in some backward

  c10::VariableVersion counter_;
  std::uint32_t version_ = 0;
  at::DimVector sizes_;
  at::DimVector strides_;
  Bytes offset_ = 0;  // in the interval
  caffe2::TypeMeta dtype_;
  c10::Device device_;
};

using SavedTensorPtr = std::shared_ptr<SavedTensor>;

class Stash final {
 public:
  static constexpr Bytes kLeastBytes = kKiB;

  /// Of tensors on `device`.
  Stash(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena, c10::Device device,
        std::optional<Bytes> budget);

  ~Stash();
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  SavedTensorPtr pack(const at::Tensor& tensor);
  at::Tensor unpack(SavedTensor& saved);
  /// What lies in their storages is never moved.
  void protect(const std::vector<at::Tensor>& tensors);
  /// No host memory is kept for a next pass any more.
  void close() noexcept;
  /// Once the transfers under way have ended.
  StashStatistics statistics() const;

 private:
  bool can_move(const at::Tensor& tensor) const;
  void begin_leaving(const StashedIntervalPtr& interval);
  void send(const StashedIntervalPtr& interval, c10::Storage storage);
  /// Lets others go, until so many bytes more fit or nothing is left to do.
  void make_room(Bytes bytes);
  /// Device memory of the saved tensor's interval, which is there for compute that is enqueued from now on.
  std::pair<c10::Storage, Bytes> fetched(SavedTensor& saved);
  /// Memory that its bytes are in, or on their way to. Throws c10::OutOfMemoryError.
  c10::Storage bring(const StashedIntervalPtr& interval, Priority priority);
  void await(const StashedIntervalPtr& interval, Ticket& arriving);
  void prefetch(std::int64_t before);

  const std::shared_ptr<DeviceBackend> backend_;
  const std::shared_ptr<HostBuffers> buffers_;
  const std::shared_ptr<StashBooks> books_;
  const c10::Device device_;
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> protected_;  // the books' mutex's
};

}  // namespace hydra
