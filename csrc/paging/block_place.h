// Where a block is: which slot it has, what the slot's bytes are, and the fill under way.
//
// It goes from state to state by whole steps; an illegal one throws StateError and changes nothing. A step to a worse
// state (become_stale, give_up_slot) is legal wherever there is a slot, and does nothing where there is none. So those
// two cannot fail.
//
// Owns the block's client; the slot's memory is the supply's. Publishing and withdrawing pages happen here alone, in
// the same step as the change of state. Not thread-safe: the pager's mutex guards it, and submitting a fill is all that
// happens under it. Sizes are bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "csrc/paging/block_client.h"
#include "csrc/paging/slot.h"

namespace hydra {

///   kAbsent    -> kReserving
///   kReserving -> kStale, kAbsent             a slot has come, or there is none
///   kStale     -> kLoading, kAbsent
///   kLoading   -> kPresent, kStale, kAbsent   compute waits for the fill; or it has failed, or the host has changed
///   kPresent   -> kStale, kAbsent
enum class BlockState : std::uint8_t {
  kAbsent,     // no slot; reading its pages raises
  kReserving,  // a thread is getting it a slot; others wait
  kLoading,    // has a slot that a lane fills; pages not readable
  kPresent,    // pages readable; may be evicted when no pin holds it
  kStale,      // has a slot with bytes that are not the host's; pages not readable
};

const char* name_of(BlockState state) noexcept;

class BlockPlace {
 public:
  BlockPlace(Bytes bytes, std::unique_ptr<BlockClient> client) noexcept : bytes_(bytes), client_(std::move(client)) {}

  BlockState state() const noexcept { return state_; }
  Bytes bytes() const noexcept { return bytes_; }    // of its slot
  void* memory() const noexcept { return memory_; }  // of its slot; null without one
  /// Of the last fill into the slot; null once known to have ended.
  const TicketPtr& ticket() const noexcept { return ticket_; }
  SlotUses& uses() noexcept { return uses_; }
  const SlotUses& uses() const noexcept { return uses_; }
  /// Pages are readable, and compute has nothing to wait for.
  bool is_ready() const noexcept { return state_ == BlockState::kPresent && !ticket_ && !uses_.written(); }
  /// There is a slot that no lane fills.
  bool can_give_up_slot() const noexcept;

  /// kAbsent -> kReserving.
  void begin_reserving();
  /// kReserving -> kAbsent.
  void cancel_reserving();
  /// kReserving -> kStale. Its fill will follow the slot's last users; a fill before is the lane's to keep in order.
  void land(Slot slot);
  /// kStale -> kLoading, behind the slot's uses. `block` is for the log. Returns the bytes that move. On an error it
  /// stays stale, with its fences: they are the next fill's.
  Bytes begin_filling(Lane& to_device, Priority priority, std::int32_t block);
  /// Compute waits for the fill: kLoading -> kPresent, unless another thread was faster. `has_ended`: no other
  /// thread has to wait for it.
  void note_filled(bool has_ended);
  /// -> kStale.
  void become_stale() noexcept;
  /// -> kAbsent. Uses that no fence covers are forgotten. No slot where there was none.
  Slot give_up_slot() noexcept;

  /// The copy of the slot's bytes to the host.
  Job write_back() { return client_->write_back(memory_); }

 private:
  /// Throws StateError if it is elsewhere.
  void advance(BlockState from, BlockState to);

  const Bytes bytes_;
  const std::unique_ptr<BlockClient> client_;
  BlockState state_ = BlockState::kAbsent;
  void* memory_ = nullptr;
  TicketPtr ticket_;
  SlotUses uses_;
};

}  // namespace hydra
