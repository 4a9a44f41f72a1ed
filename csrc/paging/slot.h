// A slot: device memory that a block lands in, and the compute that may still use it.
//
// When a use ends, its compute is enqueued but may not be finished. So a slot has fences of its users, and the lane
// that overwrites it waits for them. Compute that no fence covers yet is remembered, and cover() records one for it. A
// slot changes hands with all its fences.
//
// Owns no memory. Not thread-safe: while a block has the slot, the pager's mutex guards it. Otherwise only the thread
// that took the slot uses it. Sizes are bytes.
#pragma once

#include <utility>
#include <vector>

#include "csrc/base/types.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

/// A slot on its way from one block, or from the device, to another.
struct Slot {
  void* memory = nullptr;  // null: no slot
  Bytes bytes = 0;
  std::vector<FencePtr> fences{};  // compute that may still use it
  TicketPtr ticket{};              // the last fill; null once it is known to have ended
};

/// The compute that may still use a block's slot.
class SlotUses {
 public:
  explicit SlotUses(std::vector<FencePtr> fences = {}) noexcept : fences_(std::move(fences)) {}

  /// Notes a use that no fence covers yet.
  void note_use() noexcept { is_uncovered_ = true; }
  /// Notes the end of a use. `fence`: behind the use, or null. `covers_all`: whether the fence covers every use so far.
  /// On an error nothing has changed.
  void end_use(FencePtr fence, bool covers_all);
  /// Compute up to `written`, other than the users', writes the slot: later users wait for it. On an error nothing has
  /// changed.
  void note_written(const FencePtr& written);
  /// The last fence of note_written(); null once it is known to have been reached.
  const FencePtr& written() const noexcept { return written_; }
  void forget_written() noexcept { written_ = nullptr; }

  /// Records a fence for uses that no fence covers yet. On an error nothing has changed.
  void cover(DeviceBackend& backend);
  /// The fences that a copy into the slot has to wait for. Complete after cover().
  const std::vector<FencePtr>& fences() const noexcept { return fences_; }
  void forget_reached() noexcept;
  /// Returns the fences, which go with the slot, and forgets all uses.
  std::vector<FencePtr> hand_over() noexcept;

 private:
  std::vector<FencePtr> fences_;
  FencePtr written_;  // among fences_ until it is reached
  bool is_uncovered_ = false;
};

}  // namespace hydra
