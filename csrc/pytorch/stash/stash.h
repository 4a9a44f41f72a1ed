// What autograd saves for backward, kept off the device until backward comes for it.
//
// pack() and unpack() are the two halves of a hook on saved tensors. Tensors saved from one part of a storage share it
// (stashed_interval.h). Such intervals leave on the lane to the host as they are saved, the oldest first, and come back
// in the reverse order, ahead of a backward that has begun to ask for them. Of what the stash holds on the device it
// keeps the newest, up to its budget; once a pass has been seen, what will fit to its end does not leave at all. What
// forward and backward hold themselves comes on top.
//
// What need not come back exactly (treatment.h, wishes.h) is encoded when the next tensor is saved, because another
// operator that saves the same one, and may need it exactly, usually does so at once. The stream stays on the device
// while there is room, and leaves otherwise; unpack() decodes it.
//
// What unpack() gives otherwise has the bytes, sizes, strides, dtype and alignment of what pack() was given, and counts
// versions with it: if that was written to since, unpack() raises what torch raises. What cannot be moved is handed
// back as it was: parameters and their views, what is protected, less than kLeastBytes, other layouts, other devices.
//
// Ownership: a SavedTensor owns its share; with the last one an interval's memory goes, here and on the host, at once
// or when the transfer under way has ended. Graphs may outlive close().
// Threads: any. Nothing waits, allocates or frees with the index's mutex held; waits are without the interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/pytorch/memory/host_buffers.h"
#include "csrc/pytorch/stash/interval_index.h"
#include "csrc/pytorch/stash/saved_tensor.h"
#include "csrc/pytorch/stash/stashed_interval.h"
#include "csrc/pytorch/stash/treatment.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

class Stash final {
 public:
  static constexpr Bytes kLeastBytes = kKiB;

  /// Of tensors on `device`.
  Stash(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena, c10::Device device,
        std::optional<Bytes> budget);

  ~Stash();
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  /// Of its scopes on a thread (treatment.h); never used again.
  StashIdentity identity() const noexcept { return identity_; }

  SavedTensorPtr pack(const at::Tensor& tensor);
  at::Tensor unpack(SavedTensor& saved);
  /// What lies in their storages is never moved.
  void protect(const std::vector<at::Tensor>& tensors);
  /// No host memory is kept for a next pass any more.
  void close() noexcept;
  /// Once the transfers under way have ended.
  StashStatistics statistics() const;
  std::optional<StashPass> last_pass() const;
  std::map<std::int32_t, StashPart> parts() const;
  /// Intervals and bytes that were to be encoded and are kept as they are, by the operator that needs them so, as far
  /// as they are needed no more.
  std::map<std::string, StashExact> exact() const;

 private:
  bool can_move(const at::Tensor& tensor) const;
  /// Encodes those that others have been saved after, and sends what is to leave.
  void decide();
  /// False where it stays what it is.
  bool encode(const StashedIntervalPtr& interval);
  /// The length of its stream is known, or waited for.
  void finish(const StashedIntervalPtr& interval);
  void begin_leaving(const StashedIntervalPtr& interval);
  void send(const StashedIntervalPtr& interval, StashedInterval::Departure departure);
  /// Frees memory of others, until so many bytes more fit or nothing is left to do.
  void make_room(Bytes bytes, bool in_backward);
  /// Device memory of the saved tensor's interval, which is there for compute that is enqueued from now on.
  std::pair<c10::Storage, Bytes> fetched(SavedTensor& saved);
  /// Memory that its bytes are in, or on their way to. Throws c10::OutOfMemoryError.
  c10::Storage bring(const StashedIntervalPtr& interval, Priority priority);
  /// Memory with its bytes again. Throws c10::OutOfMemoryError.
  c10::Storage decode(StashedInterval& interval, const StashedInterval::Reading& reading);
  void await(StashedInterval& interval, Ticket& arriving);
  void prefetch(std::int64_t before);

  const StashIdentity identity_;
  const std::shared_ptr<DeviceBackend> backend_;
  const std::shared_ptr<HostBuffers> buffers_;
  const std::shared_ptr<IntervalIndex> index_;
  const c10::Device device_;
  CoderRoom room_;
  std::mutex finishing_;
  mutable std::mutex protecting_;  // what follows
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> protected_;
};

}  // namespace hydra
