// An interval: a part of a storage as it was at one version, which several saved tensors may share.
//
// Its *form* is the representation that the stash keeps: the bytes themselves or, once they are encoded, a stream from
// which they are decoded. The interval is *held* while the stash keeps device memory of its form alive. It also refers
// weakly to memory of other owners that has the bytes themselves, and reads from there if it can.
//
// Ownership: saved tensors own it. After the last one, its memory on the device and the host is freed at once, or when
// the transfer under way has ended.
// Threads: any. The index's mutex guards all mutable state. A public method is one complete step: it takes the mutex,
// and destroys freed memory without it. So the last owner must not drop an interval while it holds a Lock.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>
#include <optional>

#include "csrc/pytorch/memory/copy_store.h"
#include "csrc/pytorch/stash/coder.h"
#include "csrc/pytorch/stash/interval_index.h"
#include "csrc/pytorch/stash/treatment.h"
#include "csrc/pytorch/stash/wishes.h"
#include "csrc/transfer/fence.h"
#include "csrc/transfer/ticket.h"

namespace hydra {

/// Where the stash has an interval's bytes. Device memory of its form is held in all states but kAway.
///
///   kResident  -> kOnDevice                      a tensor that shares the interval may leave
///   kOnDevice  -> kEncoding, kLeaving
///   kEncoding  -> kMaking, kOnDevice             as a stream, or as it was: it could not be encoded
///   kMaking    -> kOnDevice
///   kLeaving   -> kCopied, kStranded
///   kCopied    -> kAway
///   kAway      -> kReturning
///   kReturning -> kCopied, kAway                 the bytes are there; or there was no room, or the copy failed
///
/// An interval may be destroyed in each state but kEncoding, in which the encoding thread keeps it alive.
enum class IntervalState : std::uint8_t {
  kResident,   // on the device, because the policy keeps it there
  kOnDevice,   // on the device; may leave, and may be encoded unless it is a stream
  kEncoding,   // a thread encodes the held bytes
  kMaking,     // a stream whose length the device has not reported yet
  kLeaving,    // being copied to the host; the form does not change any more
  kStranded,   // on the device to the end: there was no host memory, or the copy failed
  kCopied,     // on the device and on the host
  kAway,       // on the host alone
  kReturning,  // on the host, and being copied to held memory; no compute waits for the copy yet
};

const char* name_of(IntervalState state) noexcept;

class StashedInterval final : public std::enable_shared_from_this<StashedInterval> {
 public:
  using Lock = IntervalIndex::Lock;

  StashedInterval(std::shared_ptr<IntervalIndex> index, std::int64_t number, const SavedBytes& saved, Wishes wishes,
                  Staying staying);
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
  /// kOnDevice -> kEncoding. Returns null, and changes nothing, if the interval is not to be encoded.
  std::optional<Encodable> begin_encoding(c10::Device device);
  /// kEncoding -> kOnDevice. The interval stays exact for this reason.
  void refuse_encoding(const char* reason);
  /// kEncoding -> kMaking, if `made` is a fence behind the making of the stream; without one -> kOnDevice.
  void become_stream(CoderPtr coder, Encoded encoded, FencePtr made);
  struct Making {
    Encoded encoded;
    FencePtr made;
  };
  /// Null in all states but kMaking.
  std::optional<Making> making() const;
  struct Stream {
    c10::Storage storage;
    Bytes length = 0;
  };
  /// kMaking -> kOnDevice. Without `exact`, the stream stays in the memory that it was made in, and counts its length.
  void end_making(std::optional<Stream> exact);

  // ---- leaving ------------------------------------------------------------------------------------------------------
  struct Departure {
    c10::Storage storage;
    Bytes begin = 0;  // in it
    Bytes bytes = 0;
  };
  /// kOnDevice -> kLeaving. Returns null, and changes nothing, in any other state.
  std::optional<Departure> begin_leaving();
  void leave_by(TicketPtr leaving);
  /// kLeaving -> kStranded.
  void strand();

  // ---- coming back --------------------------------------------------------------------------------------------------
  /// Device memory with the bytes, or with a stream of them, or neither. If `arriving` is set, the memory is valid once
  /// that transfer has ended.
  struct Reading {
    c10::Storage storage;
    Bytes begin = 0;  // where the interval begins in it
    CoderPtr coder;
    c10::Storage stream;
    Bytes stream_bytes = 0;
    TicketPtr arriving;

    bool is_done() const noexcept { return storage && !arriving; }
  };
  /// Reads the interval for one saved tensor. The first reading that is done sets its `taken`. Once all tensors that
  /// share the interval are taken, the stash frees device memory whose bytes the host has too.
  Reading read(bool& taken);
  struct Landing {
    Bytes lead = 0;
    Bytes bytes = 0;
  };
  /// The layout of the memory that the form comes back to. Called in kAway, when the form does not change any more.
  Landing landing() const;
  /// kAway -> kReturning, into `storage`. In any other state another thread was faster. Returns the held memory.
  c10::Storage begin_return(const c10::Storage& storage, bool is_ahead,
                            const std::function<TicketPtr(StoredCopy& copy)>& submit);
  /// kReturning -> kCopied or, if the transfer has failed, -> kAway.
  void end_return(const Ticket& arriving, bool has_failed);
  /// Notes memory of other owners that has the decoded bytes.
  void note_decoded(const c10::Storage& storage);

 private:
  using enum IntervalState;
  friend class IntervalIndex;
  /// Saves the interval for its first tensor, and holds that tensor's storage.
  void start(const Lock& lock, const c10::Storage& storage, Bytes begin);
  /// Shares the interval with one more tensor. Returns true if the interval may leave since this call.
  bool share(const Lock& lock, const Wishes& wishes, Staying staying);
  bool has(const Lock& lock, const c10::Storage& storage, Bytes begin, const SavedBytes& saved,
           const Wishes& wishes) const;
  Bytes begin_in_storage(const Lock& /*lock*/) const noexcept { return elsewhere_.begin; }
  Bytes form_bytes(const Lock& /*lock*/) const noexcept { return form_.bytes; }
  bool leaves_at_once(const Lock& /*lock*/) const noexcept {
    return plan_.leaves_at_once && plan_.staying <= Staying::kWhileRoom;
  }
  bool leaves_anyway(const Lock& /*lock*/) const noexcept {
    return state_ == kLeaving && plan_.staying == Staying::kNever;
  }
  bool stays_longest(const Lock& /*lock*/) const noexcept { return plan_.staying == Staying::kLongest; }
  bool may_be_encoded_at_once(const Lock& /*lock*/) const noexcept {
    return plan_.encodes_at_once && wishes_.encodable;
  }
  bool is_in_making(const Lock& /*lock*/) const noexcept { return state_ == kMaking; }
  bool is_made(const Lock& /*lock*/) const { return making_->made->reached(); }
  bool is_away(const Lock& /*lock*/) const noexcept { return state_ == kAway; }
  bool is_on_host_alone(const Lock& /*lock*/) const noexcept;
  /// Returns null if it cannot make room.
  std::optional<IntervalIndex::RoomStep> make_room(const Lock& lock, bool in_backward);
  /// The last reader of a tensor since the interval is held. One that is there would keep the memory. Intervals of the
  /// same storage own it too, and look the same.
  enum class Reader : std::uint8_t { kNone, kGone, kMayBeThere };
  Reader reader(const Lock& lock) const noexcept;
  /// A step by which it gives up its device memory, without any allocation. Returns null if there is none. What is to
  /// be encoded leaves only as a stream: otherwise the numbers would depend on the room.
  std::optional<IntervalIndex::RoomStep> give_up(const Lock& lock);
  /// kLeaving -> kCopied, and on to kAway if room is short. Returns the freed memory.
  c10::Storage note_left(const Lock& lock, StoredCopyPtr copy);

  /// Throws StateError unless the state is `from`, from which `to` can be reached.
  void advance(const Lock& lock, IntervalState from, IntervalState to);
  bool is_copied() const noexcept { return state_ == kCopied || state_ == kReturning; }
  void note_elsewhere(const Lock& lock, const c10::Storage& storage, Bytes begin);
  c10::Storage alive() const;
  void note_new_form(const Lock& lock, Bytes bytes) noexcept;
  void hold(const Lock& lock, c10::Storage storage, Bytes begin);
  c10::Storage free(const Lock& lock) noexcept;
  c10::Storage free_copy(const Lock& lock);
  void count_outcome(const Lock& lock) const;

  /// The representation that the stash keeps.
  struct Form {
    CoderPtr coder{};  // null unless it is a stream
    Bytes bytes = 0;
    c10::Storage held{};
    Bytes begin = 0;       // where it begins in `held`
    StoredCopyPtr copy{};  // null until all bytes are there
  };
  /// Memory that has the bytes themselves, and has other owners.
  struct Elsewhere {
    c10::weak_intrusive_ptr<c10::StorageImpl> alive{c10::intrusive_ptr<c10::StorageImpl>()};
    c10::StorageImpl* storage = nullptr;  // for comparison only
    const void* data = nullptr;           // its address when the bytes were there
    Bytes begin = 0;                      // where the interval begins in it
    c10::SmallVector<c10::StorageImpl*, 1> found_by;
  };

  struct Readers {
    int waiting = 0;         // tensors that share the interval and were not read yet
    bool have_come = false;  // a tensor was read since the interval is held; others are often read next
  };

  const std::shared_ptr<IntervalIndex> index_;
  const std::int64_t number_;
  const SavedBytes saved_;
  IntervalState state_;
  Wishes wishes_;  // fixed once it is encoded: later savers have to accept them, or make an interval of their own
  // The plan is made when the interval is saved, or when a later tensor lets it leave. Readers may come in any state.
  DeparturePlan plan_;
  Readers readers_;
  Form form_;
  Elsewhere elsewhere_;
  std::optional<Making> making_;  // set in kMaking only
  TicketPtr leaving_;             // set from kLeaving on, once the transfer is submitted
  TicketPtr arriving_;            // no compute waits for it yet; its memory may outlive being held
};

}  // namespace hydra
