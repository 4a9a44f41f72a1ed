// The stash: keeps the tensors that autograd saves for backward off the device until backward reads them.
//
// pack() and unpack() are the two halves of a hook on saved tensors. Tensors saved from one part of a storage share an
// interval (stashed_interval.h). Intervals leave on the lane to the host as they are saved, the oldest first, and come
// back in the reverse order, ahead of a backward that has begun to read them. On the device the stash keeps the newest
// intervals, up to its budget. Once it has seen a pass, intervals that will fit until the end of the pass do not leave.
// The budget does not count tensors that forward and backward themselves hold.
//
// A tensor that need not come back exactly (treatment.h, wishes.h) is encoded only when the next tensor is saved: a
// second operator that saves the same tensor, and may need it exactly, usually does so at once. The stream stays on the
// device while there is room, and leaves otherwise; unpack() decodes it.
//
// All other tensors come back from unpack() with the bytes, sizes, strides, dtype and alignment of the tensor that
// pack() was given. They share its version counter: if it was written to since, unpack() raises the same error as
// torch. Some tensors stay as they are: parameters and their views, protected ones, those below kLeastBytes, and those
// with other layouts or on other devices.
//
// Ownership: saved tensors own their interval. After the last one, the interval's memory on the device and the host is
// freed at once, or when the transfer under way has ended. Graphs may outlive close().
// Threads: any. No thread waits, allocates or frees with the index's mutex held, or waits with the interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/pytorch/memory/copy_store.h"
#include "csrc/pytorch/stash/interval_index.h"
#include "csrc/pytorch/stash/saved_tensor.h"
#include "csrc/pytorch/stash/stashed_interval.h"
#include "csrc/pytorch/stash/treatment.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

class Stash final {
 public:
  static constexpr Bytes kLeastBytes = kKiB;

  /// Makes a stash for tensors on `device`. `budget`: see DeviceRoom.
  Stash(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena, c10::Device device,
        std::optional<Bytes> budget);

  ~Stash();
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  /// Identifies this stash in the scopes of threads (treatment.h). No other stash ever gets the same value.
  StashIdentity identity() const noexcept { return identity_; }

  SavedTensor pack(const at::Tensor& tensor);
  at::Tensor unpack(SavedTensor& saved);
  // Ways to make room for an allocation on the device, from inside it: no call allocates device memory. Both return
  // whether something has changed, so that the allocation is worth another attempt.
  /// Waits for the oldest transfer whose end releases memory: costs no traffic.
  bool await_leaving();
  /// Frees an interval that the host has too, or sends one that could have stayed.
  bool give_one_up();

  /// Limits host memory, and names the folder for what it has no room for; see CopyStore.
  void limit_host(Bytes bytes, std::string folder, std::shared_ptr<FileOperations> files);
  /// Changes the budget (see DeviceRoom). Returns when no more than that is held, or nothing else can leave.
  void set_budget(std::optional<Bytes> budget);
  /// Never moves tensors in the storages of these.
  void protect(const std::vector<at::Tensor>& tensors);
  /// Stops keeping host memory for a next pass.
  void close() noexcept;
  std::string obstacle() const { return copies_->obstacle(); }
  /// The transfers between host and disk, and host memory. Waits for nothing.
  CopyStatistics copies() const { return copies_->statistics(); }
  /// Waits until the transfers under way have ended.
  StashStatistics statistics() const;
  std::optional<StashPass> last_pass() const;
  std::map<std::int32_t, StashPart> parts() const;
  /// The intervals that were to be encoded but stayed exact, by the operator that needs them so, or by another reason.
  /// Counts intervals that are no longer needed.
  std::map<std::string, StashExact> exact() const;

 private:
  bool can_move(const at::Tensor& tensor) const;
  /// Encodes the intervals after which others have been saved, and sends those that leave.
  void decide();
  /// Returns false if the interval stays as it is.
  bool encode(const StashedIntervalPtr& interval);
  /// Waits for the length of the interval's stream, and moves the stream to memory of that length.
  void finish(const StashedIntervalPtr& interval);
  void begin_leaving(const StashedIntervalPtr& interval);
  void send(const StashedIntervalPtr& interval, StashedInterval::Departure departure);
  /// Frees memory of intervals until `bytes` more fit, or no interval can make room.
  void make_room(Bytes bytes, bool in_backward);
  void wait_for_room(Ticket& ticket);
  /// Waits for the lengths that intervals left unread, and counts them.
  void read_lengths() const;
  /// Returns device memory with the saved tensor's interval, and where it begins there. Compute that is enqueued from
  /// now on may read it.
  std::pair<c10::Storage, Bytes> fetched(SavedTensor& saved);
  /// Returns memory that has the bytes of the interval's form, or that they are on their way to. Throws
  /// c10::OutOfMemoryError.
  c10::Storage bring(const StashedIntervalPtr& interval, Priority priority);
  /// Returns new memory with the decoded bytes. Throws c10::OutOfMemoryError.
  c10::Storage decode(StashedInterval& interval, const StashedInterval::Reading& reading);
  void await(StashedInterval& interval, Ticket& arriving);
  void prefetch(std::int64_t before);

  const StashIdentity identity_;
  const std::shared_ptr<DeviceBackend> backend_;
  const std::shared_ptr<CopyStore> copies_;
  const std::shared_ptr<IntervalIndex> index_;
  const c10::Device device_;
  CoderRoom room_;
  std::mutex finishing_;
  std::atomic<std::thread::id> finisher_;  // the thread that has it
  mutable std::mutex protecting_;          // guards protected_
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> protected_;
};

}  // namespace hydra
