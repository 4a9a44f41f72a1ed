// The stash's books: which parts of which storages it has, in what order they were saved, and where their bytes are.
//
// An interval is part of a storage as it was at one version. Its *form* is what the stash keeps of it: these bytes, or,
// once it has been encoded, a stream that they come back from. It is *held* while the stash keeps device memory of its
// form alive; memory with the bytes themselves that others keep alive is remembered weakly, and serves as well.
// Everything of an interval but its first group is the books' mutex's; what is let go under it is handed out, to be
// destroyed without it.
// Transfers know the books and not the stash: the last to end may be a lane, which must not end its own device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/pytorch/memory/arena_region.h"
#include "csrc/pytorch/stash/coder.h"
#include "csrc/pytorch/stash/wishes.h"
#include "csrc/transfer/fence.h"
#include "csrc/transfer/ticket.h"

namespace hydra {

class StashBooks;

/// Where an interval's bytes are, as far as the stash has them. Device memory of its form is held in all but kAway.
///
///   kResident  -> kOnDevice                      a tensor that shares it may leave after all
///   kOnDevice  -> kEncoding, kLeaving
///   kEncoding  -> kMaking, kOnDevice             as a stream, or as it was: it could not be encoded
///   kMaking    -> kOnDevice
///   kLeaving   -> kCopied, kStranded
///   kCopied    -> kAway
///   kAway      -> kReturning
///   kReturning -> kCopied, kAway                 the bytes are there; or there was no room, or the copy failed
///
/// An interval may end in each but kEncoding, whose thread keeps it alive.
enum class IntervalState : std::uint8_t {
  kResident,   // on the device, where a policy wants it
  kOnDevice,   // on the device; it may be encoded, unless it is a stream, and may leave
  kEncoding,   // a thread encodes what is held
  kMaking,     // a stream of which the device has not told the length yet
  kLeaving,    // being copied to the host; the form does not change any more
  kStranded,   // on the device to the end: there was no host memory, or the copy failed
  kCopied,     // on the device and on the host
  kAway,       // on the host alone
  kReturning,  // on the host, and being copied into memory that is held; no compute has been made to wait for it yet
};

const char* name_of(IntervalState state) noexcept;

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

/// From when nothing was saved until there was nothing again.
struct StashPass {
  std::int64_t number = 0;  // from 1 on
  Bytes saved_bytes = 0;    // of intervals
  Bytes peak_bytes = 0;     // on the device, at one time

  // Of those that may leave:
  Bytes raw_bytes = 0;
  Bytes form_bytes = 0;
};

/// What a tensor's versions are counted by, which only serves to be compared.
struct VersionMark {
  const void* counter = nullptr;
  std::uint32_t version = 0;
  bool operator==(const VersionMark&) const = default;
};

struct StashedInterval {
  StashedInterval(std::shared_ptr<StashBooks> owner, std::int64_t which, Bytes size, Bytes after, VersionMark mark,
                  IntervalState initial)
      : books(std::move(owner)),
        number(which),
        raw_bytes(size),
        lead(after),
        saved_at(mark),
        state(initial),
        bytes(size) {}
  ~StashedInterval();
  /// Throws StateError if it is elsewhere, or may not go there.
  void advance(IntervalState from, IntervalState to);
  /// Tensors that share it from now on have to do with what the wishes were.
  bool is_sealed() const noexcept { return state == IntervalState::kEncoding || coder != nullptr; }
  /// Device memory that is held can be freed at once.
  bool is_copied() const noexcept { return state == IntervalState::kCopied || state == IntervalState::kReturning; }
  StashedInterval(const StashedInterval&) = delete;
  StashedInterval& operator=(const StashedInterval&) = delete;

  const std::shared_ptr<StashBooks> books;
  const std::int64_t number;
  const Bytes raw_bytes;
  const Bytes lead;  // of its first byte after a multiple of the device's alignment
  const VersionMark saved_at;
  IntervalState state;
  std::int32_t part = -1;       // of the model
  bool leaves_at_once = false;  // what comes after it in this pass will need all the room, as far as is known
  bool encodes_at_once = false;

  Wishes wishes;
  int waiting = 0;  // tensors that share it and were not asked for yet

  // The bytes themselves, where they are alive elsewhere.
  c10::weak_intrusive_ptr<c10::StorageImpl> lent{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::StorageImpl* storage = nullptr;  // for comparison
  const void* data = nullptr;           // there
  Bytes begin = 0;                      // there
  std::vector<c10::StorageImpl*> known_by;

  // Its form.
  CoderPtr coder;                       // of a stream
  std::optional<Encoded> in_making;     // in kMaking
  std::optional<c10::Stream> saved_on;  // on a GPU: what computed it, and has to encode it
  FencePtr made;                        // passed once it is
  Bytes bytes;
  c10::Storage held;
  Bytes held_begin = 0;  // in it
  ArenaRegionPtr host;   // once all bytes are there
  TicketPtr leaving;
  TicketPtr arriving;
  bool asked_for =
      false;  // in any state: by one of those that share it, since it has been held; others will want it next
};

using StashedIntervalPtr = std::shared_ptr<StashedInterval>;

class StashBooks final : public std::enable_shared_from_this<StashBooks> {
 public:
  /// The mutex, and what was looked at under it: an interval must not end while it is held.
  class Lock {
   public:
    explicit Lock(std::mutex& mutex) : guard_(mutex) {}
    StashedIntervalPtr look_at(const std::weak_ptr<StashedInterval>& known) const {
      StashedIntervalPtr interval = known.lock();
      if (interval) {
        seen_.push_back(interval);
      }
      return interval;
    }

   private:
    mutable std::vector<StashedIntervalPtr> seen_;  // outlives the guard
    const std::lock_guard<std::mutex> guard_;
  };

  /// Without a budget as little as transfers need is held: twice the largest interval, or an eighth of the last pass.
  explicit StashBooks(std::optional<Bytes> budget) : budget_(budget) {}

  std::mutex& mutex() const noexcept { return mutex_; }

  // ---- with the mutex held ------------------------------------------------------------------------------------------
  StashStatistics statistics;
  /// What became of what a part of the model saved, as far as it is needed no more; in bytes of the tensors.
  struct Part {
    Bytes kept = 0;     // by choice
    Bytes stayed = 0;   // there was room, or a policy that moves convolutions' inputs alone
    Bytes moved = 0;    // as it was
    Bytes encoded = 0;  // and what that became
    Bytes streams = 0;
  };
  std::map<std::int32_t, Part> parts;
  /// What was kept as it is although it might have been encoded, by the operator that needs it so.
  struct Exact {
    std::int64_t intervals = 0;
    Bytes bytes = 0;
  };
  std::map<std::string, Exact> exact;

  bool has_room(Bytes bytes) const noexcept;
  /// Whether so much more may come back ahead of time. Without a budget one of the largest intervals, or an eighth of
  /// the last pass, is on its way.
  bool may_come_ahead(Bytes bytes) const noexcept;
  /// Of what is there now, with room made for it.
  void note_peak() noexcept;
  /// The last one that has ended.
  const std::optional<StashPass>& last_pass() const noexcept { return last_pass_; }
  bool is_newest(const StashedInterval& interval) const noexcept { return interval.number == numbered_ - 1; }
  /// An interval that these bytes of the storage lie in, as they are now, and that has what is wished; null if there is
  /// none.
  StashedIntervalPtr find(const Lock& lock, const c10::Storage& storage, Bytes begin, Bytes end, VersionMark mark,
                          const Wishes& wishes) const;
  /// A new one, of memory that is held from now on.
  StashedIntervalPtr enter(const c10::Storage& storage, Bytes begin, Bytes bytes, Bytes lead, VersionMark mark,
                           Wishes wishes, bool resident);
  /// Memory with its form.
  void hold(const StashedIntervalPtr& interval, c10::Storage storage, Bytes begin);
  /// One that the host has, too.
  c10::Storage free_copied(StashedInterval& interval);
  void note_asked_for(StashedInterval& interval) noexcept;
  /// It is one that may leave after all.
  void end_residence(const StashedIntervalPtr& interval);
  /// Memory with the bytes themselves, which its owners keep alive.
  void lend(const StashedIntervalPtr& interval, const c10::Storage& storage, Bytes begin);
  /// Of them, what is alive.
  c10::Storage alive(const StashedInterval& interval) const;
  /// A held one becomes a stream; what was held is returned.
  c10::Storage become_stream(const StashedIntervalPtr& interval, CoderPtr coder, const c10::Storage& stream,
                             Bytes length);
  /// Its stream is found to be shorter.
  c10::Storage shorten(const StashedIntervalPtr& interval, const c10::Storage& stream, Bytes length);
  /// The oldest that is held and can be let go, or leave, or is on its way; but not one that others will ask for next.
  StashedIntervalPtr oldest_held(const Lock& lock, bool in_backward);
  /// The one saved last before `number` that is on the host alone.
  StashedIntervalPtr latest_away(const Lock& lock, std::int64_t number) const;

  // ---- without it ---------------------------------------------------------------------------------------------------
  /// All bytes of an interval are on the host; null for one that has gone meanwhile. For the lane.
  void left(const StashedIntervalPtr& interval, ArenaRegionPtr host, Bytes bytes);
  void forget(StashedInterval& interval) noexcept;

 private:
  c10::Storage let_go(StashedInterval& interval);
  void plan(StashedInterval& interval);
  Bytes pass_bytes() const noexcept { return last_pass_ ? last_pass_->form_bytes : pass_.form_bytes; }

  const std::optional<Bytes> budget_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::weak_ptr<StashedInterval>> saved_;  // in the order of saving
  std::map<std::int64_t, std::weak_ptr<StashedInterval>> held_;   // of them
  std::unordered_map<c10::StorageImpl*, std::vector<std::weak_ptr<StashedInterval>>> known_;
  std::int64_t numbered_ = 0;
  Bytes largest_ = 0;
  Bytes asked_for_bytes_ = 0;  // of what is held
  StashPass pass_{.number = 1};
  std::optional<StashPass> last_pass_;
};

}  // namespace hydra
