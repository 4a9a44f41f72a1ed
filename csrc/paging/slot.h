// A slot: device memory that a block lands in, and the compute that may still use it.
//
// A use that has ended is enqueued, not finished. So a slot has fences of its users, and the lane that overwrites it
// waits for them. Compute that no fence covers yet is remembered, and cover() records one for it. A slot changes hands
// with all its fences; they go in one list, the last one recorded at the end.
//
// Owns no memory. Not thread-safe: while a block has the slot, the pager's mutex guards it; while none has, it is the
// thread's that took it. Sizes are bytes.
#pragma once

#include <utility>
#include <vector>

#include "csrc/base/types.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

/// A slot that no block has.
struct Slot {
  void* memory = nullptr;  // null: no slot
  Bytes bytes = 0;
  std::vector<FencePtr> fences{};  // behind its last uses
  TicketPtr ticket{};              // of its last fill; null once known to have ended
};

/// The compute that may still use a block's slot.
class SlotUses {
 public:
  explicit SlotUses(std::vector<FencePtr> fences = {}) noexcept : fences_(std::move(fences)) {}

  /// Compute uses the slot that no fence covers.
  void note_use() noexcept { is_uncovered_ = true; }
  /// A use has ended. `fence` may be null; `covers_all`: it covers every use so far. On an error nothing has changed.
  void end_use(FencePtr fence, bool covers_all);
  /// Other compute than its users' has written the slot: they have to follow it. On an error nothing has changed.
  void note_written(const FencePtr& written);
  /// Null once it is known to have been reached.
  const FencePtr& written() const noexcept { return written_; }
  void forget_written() noexcept { written_ = nullptr; }

  /// Records a fence behind uses that none covers. On an error nothing has changed.
  void cover(DeviceBackend& backend);
  /// What overwrites the slot waits for these, once cover() has been called.
  const std::vector<FencePtr>& fences() const noexcept { return fences_; }
  void forget_reached() noexcept;
  /// The fences, which go with the slot. None are left here.
  std::vector<FencePtr> hand_over() noexcept;

 private:
  std::vector<FencePtr> fences_;
  FencePtr written_;  // one of those
  bool is_uncovered_ = false;
};

}  // namespace hydra
