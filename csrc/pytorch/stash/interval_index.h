// Which parts of which storages a stash has, and in what order they are encoded, leave and come back.
//
// The index knows intervals (stashed_interval.h) weakly: saved tensors own them. It finds the one that a tensor lies
// in, and says which is next. What an interval then goes through is the interval's own.
//
// Threads: any. One mutex guards the index and all its intervals. What needs it held takes the Lock, which is the
// proof; what does not takes it itself. Nothing waits under it, and storages that are freed under it are destroyed
// without it. Transfers know the index and not the stash: the last to end may be a lane, which must not end its own
// device.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/pytorch/memory/arena_region.h"
#include "csrc/pytorch/stash/device_room.h"
#include "csrc/pytorch/stash/wishes.h"
#include "csrc/transfer/ticket.h"

namespace hydra {

class StashedInterval;
using StashedIntervalPtr = std::shared_ptr<StashedInterval>;

struct StashStatistics {
  std::int64_t tensors = 0;    // saved
  std::int64_t kept = 0;       // of them handed back as they were
  std::int64_t intervals = 0;  // that the others share
  Bytes saved_bytes = 0;       // of intervals
  std::int64_t encoded = 0;    // of them
  Bytes encoded_bytes = 0;     // of these, before
  Bytes stream_bytes = 0;      // and after
  Bytes to_host_bytes = 0;     // counted where they are copied
  Bytes to_device_bytes = 0;
  std::int64_t prefetched = 0;         // intervals that came back ahead of their use
  std::int64_t stayed = 0;             // that could not leave: no host memory, or a failed transfer
  Bytes resident_bytes = 0;            // on the device now, which were not to leave; not among the held ones
  double wait_seconds = 0.0;           // for room, while saving
  double backward_wait_seconds = 0.0;  // for bytes to come back
  Bytes held_bytes = 0;                // on the device now
  Bytes peak_held_bytes = 0;
  Bytes host_bytes = 0;  // lent by the host now
};

/// What became of what a part of the model saved, as far as it is needed no more; in bytes of the tensors.
struct StashPart {
  Bytes kept = 0;     // by choice
  Bytes stayed = 0;   // there was room, or a policy that moves convolutions' inputs alone
  Bytes moved = 0;    // as it was
  Bytes encoded = 0;  // and what that became
  Bytes streams = 0;
};

/// What was kept as it is although it might have been encoded.
struct StashExact {
  std::int64_t intervals = 0;
  Bytes bytes = 0;
};

/// What nothing is decided by.
struct StashFigures {
  StashStatistics statistics;  // but what is on the device and on the host now
  std::map<std::int32_t, StashPart> parts;
  std::map<std::string, StashExact> exact;  // by the operator that needs it so
};

/// What a tensor's versions are counted by, which only serves to be compared.
struct VersionMark {
  const void* counter = nullptr;
  std::uint32_t version = 0;
  bool operator==(const VersionMark&) const = default;
};

/// Bytes of a storage, as they were saved.
struct SavedBytes {
  Bytes bytes = 0;
  Bytes lead = 0;  // of the first one after a multiple of the device's alignment
  VersionMark mark;
  std::optional<c10::Stream> stream;  // on a GPU: what computed them, and has to encode them
  std::int32_t part = -1;             // of the model
};

class IntervalIndex final : public std::enable_shared_from_this<IntervalIndex> {
 public:
  /// The mutex, and what was looked at under it: an interval must not end while it is held.
  class Lock {
   public:
    explicit Lock(const IntervalIndex& index) : guard_(index.mutex_) {}
    StashedIntervalPtr look_at(const std::weak_ptr<StashedInterval>& known) const;

   private:
    mutable std::vector<StashedIntervalPtr> seen_;  // outlives the guard
    const std::lock_guard<std::mutex> guard_;
  };

  /// Of as much device memory as DeviceRoom says.
  explicit IntervalIndex(std::optional<Bytes> budget) : room_(budget) {}

  /// What a tensor is saved in.
  struct Entry {
    StashedIntervalPtr interval;
    Bytes begin = 0;         // of the interval, in the tensor's storage
    bool may_leave = false;  // from now on, and not before
    bool leaves = false;     // at once, as it is
  };
  /// The interval that these bytes of the storage lie in, as they are now, and that has what is wished; or a new one,
  /// of memory that is held from now on.
  Entry enter(const c10::Storage& storage, Bytes begin, const SavedBytes& saved, Wishes wishes, bool is_resident);

  struct EncodingTurn {
    StashedIntervalPtr interval;  // null if it is none's turn
    bool is_made = false;         // its stream is; otherwise others have been saved after it
    bool leaves_at_once = false;
  };
  EncodingTurn next_to_encode();
  /// What makes room: memory that was freed, or what has to be done first.
  struct RoomStep {
    c10::Storage freed;
    TicketPtr leaving;             // to be waited for
    StashedIntervalPtr departing;  // to be encoded, or sent
  };
  /// Of the oldest interval that can make any, but not of one that others will ask for next. Null if there is room for
  /// so many bytes more, or nothing left to do.
  std::optional<RoomStep> next_for_room(Bytes bytes, bool in_backward);
  /// The one saved last before `number` that is on the host alone; null if it may not come ahead of time.
  StashedIntervalPtr next_to_return(std::int64_t number) const;
  /// All bytes of an interval are on the host; null for one that has gone meanwhile. For the lane.
  void note_left(const StashedIntervalPtr& interval, ArenaRegionPtr host, Bytes bytes);

  DeviceRoom& room(const Lock& /*lock*/) noexcept { return room_; }
  StashFigures& figures(const Lock& /*lock*/) noexcept { return figures_; }

  // For intervals, of themselves:
  void note_held(const Lock& lock, const StashedIntervalPtr& interval);
  void note_freed(const Lock& lock, const StashedInterval& interval) noexcept;
  /// It may be found by that storage.
  void note_storage(const Lock& lock, c10::StorageImpl* storage, const StashedIntervalPtr& interval);
  void await_length(const Lock& lock, const StashedIntervalPtr& interval);
  void forget(const Lock& lock, const StashedInterval& interval,
              const std::vector<c10::StorageImpl*>& storages) noexcept;

 private:
  StashedIntervalPtr find(const Lock& lock, const c10::Storage& storage, Bytes begin, const SavedBytes& saved,
                          const Wishes& wishes) const;

  mutable std::mutex mutex_;
  DeviceRoom room_;
  StashFigures figures_;
  std::map<std::int64_t, std::weak_ptr<StashedInterval>> saved_;  // in the order of saving
  std::map<std::int64_t, std::weak_ptr<StashedInterval>> held_;   // of them, those that may leave
  std::unordered_map<c10::StorageImpl*, std::vector<std::weak_ptr<StashedInterval>>> by_storage_;
  std::deque<std::weak_ptr<StashedInterval>> undecided_;  // until others have been saved after them
  std::deque<std::weak_ptr<StashedInterval>> in_making_;
  std::int64_t numbered_ = 0;
};

}  // namespace hydra
