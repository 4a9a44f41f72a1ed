// The place of a block: the slot it has, whether the slot's bytes are the host's, and the fill under way.
//
// The state changes by whole steps; an illegal step throws StateError and changes nothing. A step to a worse state
// (become_stale, give_up_slot) is legal wherever there is a slot, and does nothing where there is none. So these two
// cannot fail.
//
// Owns the block's client, but not the slot's memory. Pages are published and withdrawn only here, in the same step as
// the change of state. Not thread-safe: the pager's mutex guards it. No step waits. Sizes are bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "csrc/paging/block_client.h"
#include "csrc/paging/slot.h"

namespace hydra {

///   kAbsent    -> kReserving
///   kReserving -> kStale, kAbsent             the block gets a slot, or there is none
///   kStale     -> kLoading, kAbsent
///   kLoading   -> kPresent                    compute waits for the fill
///   kLoading   -> kStale, kAbsent             the fill has failed or is out of date, or the block is evicted
///   kPresent   -> kStale, kAbsent
enum class BlockState : std::uint8_t {
  kAbsent,     // no slot; reading its pages raises
  kReserving,  // a thread is reserving a slot for it; other threads wait
  kLoading,    // a lane fills its slot; pages not readable
  kPresent,    // pages readable; may be evicted while it is not pinned
  kStale,      // the bytes in its slot are not the host's; pages not readable
};

const char* name_of(BlockState state) noexcept;

class BlockPlace {
 public:
  BlockPlace(Bytes bytes, std::unique_ptr<BlockClient> client) noexcept : bytes_(bytes), client_(std::move(client)) {}

  BlockState state() const noexcept { return state_; }
  /// The size of its slot.
  Bytes bytes() const noexcept { return bytes_; }
  /// The memory of its slot; null without one.
  void* memory() const noexcept { return memory_; }
  /// The last fill of the slot, for this block or for one that had the slot before. Null once it is known to have
  /// ended.
  const TicketPtr& ticket() const noexcept { return ticket_; }
  SlotUses& uses() noexcept { return uses_; }
  const SlotUses& uses() const noexcept { return uses_; }
  /// Whether pages are readable and compute has nothing to wait for.
  bool is_ready() const noexcept { return state_ == BlockState::kPresent && !ticket_ && !uses_.written(); }
  /// Whether the slot may be taken for another use. Not during a fill that no compute waits for yet.
  bool can_give_up_slot() const noexcept;

  /// kAbsent -> kReserving.
  void begin_reserving();
  /// kReserving -> kAbsent.
  void cancel_reserving();
  /// kReserving -> kStale. The slot brings its last uses and its last fill along. The next fill follows the uses; the
  /// lane runs it behind the last one.
  void land(Slot slot);
  /// kStale -> kLoading. Submits the fill behind the slot's uses. `block`: for the log. Returns the bytes that move. On
  /// an error it stays stale and keeps its fences for the next fill.
  Bytes begin_filling(Lane& to_device, Priority priority, std::int32_t block);
  /// kLoading -> kPresent, unless another thread has made the step. The caller's compute waits for the fill.
  /// `has_ended`: no other thread has to wait for the fill.
  void note_filled(bool has_ended);
  /// -> kStale.
  void become_stale() noexcept;
  /// -> kAbsent. Forgets uses that no fence covers. Returns no slot if there was none.
  Slot give_up_slot() noexcept;

  /// The copy that writes the slot back.
  Job write_back() { return client_->write_back(memory_); }

 private:
  /// Throws StateError if the state is not `from`.
  void advance(BlockState from, BlockState to);

  const Bytes bytes_;
  const std::unique_ptr<BlockClient> client_;
  BlockState state_ = BlockState::kAbsent;
  void* memory_ = nullptr;
  TicketPtr ticket_;
  SlotUses uses_;
};

}  // namespace hydra
