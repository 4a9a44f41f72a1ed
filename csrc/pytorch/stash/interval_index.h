// The index of a stash's intervals, and the order in which they are encoded, leave and come back.
//
// The index refers to intervals (stashed_interval.h) weakly: saved tensors own them. It finds the interval that a
// tensor lies in, and tells which interval is next. The interval itself does the steps.
//
// Threads: any. One mutex guards the index and all its intervals. Functions that need it held take a Lock as proof; all
// others take the mutex themselves. No thread waits under it, and storages that are freed under it are destroyed
// without it. Transfers refer to the index and not to the stash: the last owner may be a lane, which must not destroy
// its own device.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/pytorch/memory/copy_store.h"
#include "csrc/pytorch/stash/device_room.h"
#include "csrc/pytorch/stash/treatment.h"
#include "csrc/pytorch/stash/wishes.h"
#include "csrc/transfer/fence.h"
#include "csrc/transfer/ticket.h"

namespace hydra {

class StashedInterval;
using StashedIntervalPtr = std::shared_ptr<StashedInterval>;

struct StashStatistics {
  std::int64_t tensors = 0;    // tensors that were saved
  std::int64_t kept = 0;       // saved tensors that were kept as they are
  std::int64_t intervals = 0;  // intervals that the other tensors share
  Bytes saved_bytes = 0;       // bytes of intervals
  std::int64_t encoded = 0;    // intervals that were encoded
  Bytes encoded_bytes = 0;     // bytes of encoded intervals
  Bytes stream_bytes = 0;      // bytes of their streams
  Bytes to_host_bytes = 0;     // counted when the copy has ended
  Bytes to_device_bytes = 0;
  std::int64_t prefetched = 0;         // intervals that came back ahead of their use
  std::int64_t stayed = 0;             // intervals that could not leave: no host memory, or a failed transfer
  Bytes resident_bytes = 0;            // bytes on the device now that have to stay; held_bytes does not count them
  double wait_seconds = 0.0;           // seconds that saving waited for room
  double backward_wait_seconds = 0.0;  // seconds that backward waited for bytes
  Bytes held_bytes = 0;                // other bytes on the device now
  Bytes peak_held_bytes = 0;
  Bytes host_bytes = 0;  // bytes of host memory in use now
};

/// What happened to the bytes that a part of the model saved, counted when they are no longer needed.
struct StashPart {
  Bytes kept = 0;     // kept by policy
  Bytes stayed = 0;   // never left: there was room, or the policy moves only the inputs of convolutions
  Bytes moved = 0;    // left as they were
  Bytes encoded = 0;  // were encoded
  Bytes streams = 0;  // the bytes of their streams
};

/// Intervals that stayed exact although their policy would encode them.
struct StashExact {
  std::int64_t intervals = 0;
  Bytes bytes = 0;
};

/// The stream of an interval that has ended before the device reported its length. Until that is read, figures count
/// the memory that the stream was made in.
struct UnreadLength {
  at::Tensor header;
  Bytes (*read)(const void* header, Bytes made) = nullptr;
  Bytes made_bytes = 0;
  FencePtr made;
  Bytes saved_bytes = 0;
  std::int32_t part = -1;
  Wishes wishes;
};

/// Figures for reports. No decision depends on them.
struct StashFigures {
  /// Counts a length later; those that the device has reported by now, at once.
  void leave_unread(UnreadLength length);
  /// The device has to have reported it.
  void count_length(const UnreadLength& length);

  StashStatistics statistics;  // except for the bytes that are on the device and on the host now
  std::map<std::int32_t, StashPart> parts;
  std::map<std::string, StashExact> exact;  // by the operator that needs exact bytes, or by another reason
  std::deque<UnreadLength> unread;
};

/// The identity and value of a tensor's version counter, for comparison only.
struct VersionMark {
  const void* counter = nullptr;
  std::uint32_t version = 0;
  bool operator==(const VersionMark&) const = default;
};

/// Bytes of a storage at the time when they were saved.
struct SavedBytes {
  Bytes bytes = 0;
  Bytes lead = 0;  // the distance of the first byte from the last multiple of the device's alignment
  VersionMark mark;
  std::optional<c10::Stream> stream;  // on a GPU: the stream that computed them, and has to encode them
  std::int32_t part = -1;             // the part of the model that saved them
};

class IntervalIndex final : public std::enable_shared_from_this<IntervalIndex> {
 public:
  /// Holds the mutex. It also owns the intervals that were looked at, since none may be destroyed under the mutex.
  class Lock {
   public:
    explicit Lock(const IntervalIndex& index) : guard_(index.mutex_) {}
    StashedIntervalPtr look_at(const std::weak_ptr<StashedInterval>& known) const;

   private:
    mutable std::vector<StashedIntervalPtr> seen_;  // outlives the guard
    const std::lock_guard<std::mutex> guard_;
  };

  /// `budget`: see DeviceRoom.
  explicit IntervalIndex(std::optional<Bytes> budget) : room_(budget) {}

  /// The interval that a tensor is saved in.
  struct Entry {
    StashedIntervalPtr interval;
    Bytes begin = 0;          // where the interval begins in the tensor's storage
    bool may_encode = false;  // whether it may leave since this call, and intervals are to be encoded
    bool leaves = false;      // whether it leaves at once, without being encoded
    bool stays = false;       // whether no interval is to be encoded or to leave now
  };
  /// Finds the interval that has these bytes of the storage, in their present version, as `wishes` need them. Otherwise
  /// makes a new one, which holds the storage from now on.
  Entry enter(const c10::Storage& storage, Bytes begin, const SavedBytes& saved, Wishes wishes, Staying staying);

  struct EncodingTurn {
    StashedIntervalPtr interval;  // null if there is nothing to do
    bool is_made = false;         // whether its stream is made; otherwise it is to be encoded now
    bool leaves_at_once = false;
  };
  /// Returns the next interval whose stream is made, or that is to be encoded because others were saved after it.
  EncodingTurn next_to_encode();
  /// One step that makes room: memory that was freed, or an action that has to come first.
  struct RoomStep {
    c10::Storage freed;
    TicketPtr awaited;             // wait for it
    StashedIntervalPtr departing;  // encode or send it
  };
  /// Returns a step of the oldest interval that can make room, except for one that backward will read again next. Those
  /// that are leaving and never stay come before all others. Null if there is room for `bytes` more, or no interval can
  /// make any.
  std::optional<RoomStep> next_for_room(Bytes bytes, bool in_backward);
  /// The oldest transfer under way whose end releases device memory (see note_releasing); null if there is none.
  TicketPtr next_to_release();
  /// Returns a step by which an interval gives up its device memory, whatever the room. Null if none can. The oldest
  /// that backward has not read comes first, then the oldest that it has read: it may read that again, as another
  /// tensor, or in another backward through the same graph. Behind them come those whose memory an operator may still
  /// read, and last those that are to stay the longest.
  std::optional<RoomStep> next_to_give_up();
  /// Returns the interval that was saved last before `number` and is on the host alone. Null if there is none, or it
  /// may not come ahead of its use.
  StashedIntervalPtr next_to_return(std::int64_t number) const;
  /// Notes that all bytes of an interval are on the host. Called by the lane, with null if the interval has ended.
  void note_left(const StashedIntervalPtr& interval, StoredCopyPtr copy, Bytes bytes);

  DeviceRoom& room(const Lock& /*lock*/) noexcept { return room_; }
  StashFigures& figures(const Lock& /*lock*/) noexcept { return figures_; }

  // Called by intervals about themselves:
  void note_held(const Lock& lock, const StashedIntervalPtr& interval);
  void note_freed(const Lock& lock, const StashedInterval& interval) noexcept;
  /// Notes a transfer to whose end device memory stays, but no longer: an interval leaves by it, or was freed since.
  void note_releasing(const Lock& lock, TicketPtr transfer);
  /// Lets the interval be found by that storage.
  void note_storage(const Lock& lock, c10::StorageImpl* storage, const StashedIntervalPtr& interval);
  void await_length(const Lock& lock, const StashedIntervalPtr& interval);
  void forget(const Lock& lock, const StashedInterval& interval, c10::ArrayRef<c10::StorageImpl*> storages) noexcept;

 private:
  void drop_released(const Lock& lock) noexcept;
  StashedIntervalPtr find(const Lock& lock, const c10::Storage& storage, Bytes begin, const SavedBytes& saved,
                          const Wishes& wishes) const;

  mutable std::mutex mutex_;
  DeviceRoom room_;
  StashFigures figures_;
  // By their numbers, in the order of saving. An interval goes from one to the other. Look-ups in backward must not
  // take longer the more are saved.
  std::map<std::int64_t, std::weak_ptr<StashedInterval>> held_;  // those that are held and may leave
  std::map<std::int64_t, std::weak_ptr<StashedInterval>> away_;  // those that only the host has
  std::unordered_map<c10::StorageImpl*, c10::SmallVector<std::weak_ptr<StashedInterval>, 1>> by_storage_;
  std::deque<std::weak_ptr<StashedInterval>> undecided_;  // to be encoded once others have been saved after them
  std::deque<std::weak_ptr<StashedInterval>> in_making_;
  std::deque<TicketPtr> releasing_;
  std::int64_t numbered_ = 0;
  std::int64_t living_ = 0;  // intervals that exist
};

}  // namespace hydra
