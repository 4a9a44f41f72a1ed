// An interval: part of a storage as it was at one version, which tensors that were saved share.
//
// Its *form* is what the stash keeps of it: these bytes, or, once it has been encoded, a stream that they come back
// from. It is *held* while the stash keeps device memory of its form alive. Memory with the bytes themselves that has
// other owners is remembered weakly, and serves as well.
//
// Ownership: saved tensors own it; with the last one its memory goes, here and on the host, at once or when the
// transfer under way has ended. Threads: any. All that changes is the index's mutex's. A method is one whole step: it
// takes the mutex, and destroys without it what it frees. So an interval's last owner must not let it end while it
// holds a Lock.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/pytorch/memory/arena_region.h"
#include "csrc/pytorch/stash/coder.h"
#include "csrc/pytorch/stash/interval_index.h"
#include "csrc/pytorch/stash/wishes.h"
#include "csrc/transfer/fence.h"
#include "csrc/transfer/ticket.h"

namespace hydra {

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

class StashedInterval final : public std::enable_shared_from_this<StashedInterval> {
 public:
  using Lock = IntervalIndex::Lock;

  StashedInterval(std::shared_ptr<IntervalIndex> index, std::int64_t number, const SavedBytes& saved, Wishes wishes,
                  bool is_resident);
  ~StashedInterval();
  StashedInterval(const StashedInterval&) = delete;
  StashedInterval& operator=(const StashedInterval&) = delete;

  std::int64_t number() const noexcept { return number_; }  // in the order of saving
  const SavedBytes& saved() const noexcept { return saved_; }

  // ---- encoding -----------------------------------------------------------------------------------------------------
  struct Encodable {
    CoderPtr coder;
    c10::Storage storage;
    DeviceBytes from;  // in it
  };
  /// kOnDevice -> kEncoding; null, and nothing has changed, where it stays what it is.
  std::optional<Encodable> begin_encoding(c10::Device device);
  /// kEncoding -> kOnDevice. It is not encoded, and that is why.
  void refuse_encoding(const char* reason);
  /// kEncoding -> kMaking, with a fence that is passed once the stream is made; otherwise -> kOnDevice.
  void become_stream(CoderPtr coder, Encoded encoded, FencePtr made);
  struct Making {
    Encoded encoded;
    FencePtr made;
  };
  /// In kMaking.
  std::optional<Making> making() const;
  struct Stream {
    c10::Storage storage;
    Bytes length = 0;
  };
  /// kMaking -> kOnDevice. Without a stream it stays in the memory, and as long, as it was made.
  void end_making(std::optional<Stream> exact);

  // ---- leaving ------------------------------------------------------------------------------------------------------
  struct Departure {
    c10::Storage storage;
    Bytes begin = 0;  // in it
    Bytes bytes = 0;
    bool is_stream = false;
  };
  /// kOnDevice -> kLeaving; null, and nothing has changed, in any other state.
  std::optional<Departure> begin_leaving();
  void leave_by(TicketPtr leaving);
  /// kLeaving -> kStranded.
  void strand();

  // ---- coming back --------------------------------------------------------------------------------------------------
  /// Device memory with the bytes, once nothing is arriving; or else a stream of them; or neither.
  struct Reading {
    c10::Storage storage;
    Bytes begin = 0;  // in it
    CoderPtr coder;
    c10::Storage stream;
    Bytes stream_bytes = 0;
    TicketPtr arriving;  // to be waited for

    bool is_done() const noexcept { return storage && !arriving; }
  };
  /// For a saved tensor, whose first reading that is done counts it as `taken`. The last one of all that share the
  /// interval frees what the host has, too.
  Reading read(bool& taken);
  struct Landing {
    Bytes lead = 0;
    Bytes bytes = 0;
  };
  /// In kAway, when the form does not change any more: the memory that it comes back into.
  Landing landing() const;
  /// kAway -> kReturning, into that memory. Otherwise another thread was faster. Returns what is held.
  c10::Storage begin_return(const c10::Storage& storage, bool is_ahead,
                            const std::function<TicketPtr(const ArenaRegionPtr& host)>& submit);
  /// kReturning -> kCopied, or, if it failed, -> kAway.
  void end_return(const Ticket& arriving, bool has_failed);
  /// Memory with the bytes themselves, which has other owners.
  void note_decoded(const c10::Storage& storage);

 private:
  using enum IntervalState;
  friend class IntervalIndex;
  /// It has begun to be saved from that storage.
  void start(const Lock& lock, const c10::Storage& storage, Bytes begin);
  /// For one more tensor. True if it may leave from now on.
  bool share(const Lock& lock, const Wishes& wishes, bool is_resident);
  bool has(const Lock& lock, const c10::Storage& storage, Bytes begin, const SavedBytes& saved,
           const Wishes& wishes) const;
  Bytes begin_in_storage(const Lock& /*lock*/) const noexcept { return elsewhere_.begin; }
  Bytes form_bytes(const Lock& /*lock*/) const noexcept { return form_.bytes; }
  bool leaves_at_once(const Lock& /*lock*/) const noexcept { return plan_.leaves_at_once; }
  bool may_be_encoded_at_once(const Lock& /*lock*/) const noexcept {
    return plan_.encodes_at_once && wishes_.encodable;
  }
  bool is_in_making(const Lock& /*lock*/) const noexcept { return state_ == kMaking; }
  bool is_made(const Lock& /*lock*/) const { return making_->made->reached(); }
  bool is_on_host_alone(const Lock& /*lock*/) const noexcept;
  /// Null if it can make none.
  std::optional<IntervalIndex::RoomStep> make_room(const Lock& lock, bool in_backward);
  /// kLeaving -> kCopied, and on to kAway where room is short. Returns what was freed.
  c10::Storage note_left(const Lock& lock, ArenaRegionPtr host);

  /// Throws StateError if it is elsewhere, or may not go there.
  void advance(const Lock& lock, IntervalState from, IntervalState to);
  bool is_copied() const noexcept { return state_ == kCopied || state_ == kReturning; }
  void note_elsewhere(const Lock& lock, const c10::Storage& storage, Bytes begin);
  c10::Storage alive() const;
  void hold(const Lock& lock, c10::Storage storage, Bytes begin);
  c10::Storage free(const Lock& lock) noexcept;
  c10::Storage free_copy(const Lock& lock);
  void count_outcome(const Lock& lock) const;

  /// What the stash keeps.
  struct Form {
    CoderPtr coder{};  // of a stream
    Bytes bytes = 0;
    c10::Storage held{};
    Bytes begin = 0;        // in it
    ArenaRegionPtr host{};  // once all bytes are there
  };
  /// The bytes themselves, in memory that has other owners as well.
  struct Elsewhere {
    c10::weak_intrusive_ptr<c10::StorageImpl> alive{c10::intrusive_ptr<c10::StorageImpl>()};
    c10::StorageImpl* storage = nullptr;  // for comparison
    const void* data = nullptr;           // there
    Bytes begin = 0;                      // there
    std::vector<c10::StorageImpl*> found_by;
  };

  struct Readers {
    int waiting = 0;         // tensors that share it and were not asked for yet
    bool have_come = false;  // one of them, since it has been held; others will want it next
  };

  const std::shared_ptr<IntervalIndex> index_;
  const std::int64_t number_;
  const SavedBytes saved_;
  IntervalState state_;
  Wishes wishes_;  // once it is encoded, those that save it have to do with what they were
  // No states: the plan is made as it is saved, and stands; readers may come in any state.
  DeparturePlan plan_;
  Readers readers_;
  Form form_;
  Elsewhere elsewhere_;
  std::optional<Making> making_;  // in kMaking
  TicketPtr leaving_;             // from kLeaving on, once it is submitted
  TicketPtr arriving_;            // that no compute was made to wait for; memory that was freed since may still live
};

}  // namespace hydra
