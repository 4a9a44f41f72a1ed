// The pager: which block is in which slot, what pins it, and what goes when room is needed.
//
// It decides and keeps count; bytes are moved by the backend's lanes. A block is fetched when it is acquired,
// or ahead of time when a pass runs in the order recorded before. Slots come from a resource under the run's
// ledger; when the ledger refuses, unpinned blocks go, the one that is needed last first.
//
// It owns its parts: the blocks (block_table.h), what happens to their bytes (block_contents.h), where slots come from
// (slot_supply.h), fills (block_fills.h) and passes (passes.h). Each knows those before it. Contents and passes are
// handed out; the others are the pager's own.
//
// Threads: every call may come from any thread. Blocking calls (acquire, evict_one, close, and those that parts name)
// must not be made with the interpreter lock held. Locking: one mutex, the table's; slot memory is never allocated or
// released and no lane is waited for while it is held, so evict_one() may be called back from inside an allocation.
// Unpinning means enqueued, not finished: each slot has fences of its users (slot.h), and the lane that overwrites it
// waits for them. In a forked child what would use a block throws StateError, and what would end a use, or the pager,
// does nothing.
#pragma once

#include <memory>
#include <string>

#include "csrc/memory/ledger.h"
#include "csrc/memory/resource.h"
#include "csrc/paging/block_contents.h"
#include "csrc/paging/block_fills.h"
#include "csrc/paging/block_table.h"
#include "csrc/paging/passes.h"
#include "csrc/paging/slot_supply.h"

namespace hydra {

struct PagerOptions {
  Relief relief{};
  ActivationRoom activations{};
  bool fault_path = true;  // off: meeting an absent block throws PageFaultError
};

class Pager {
 public:
  /// `slots` hands out slot memory under `ledger`'s limit; both, and `backend`, have to outlive the pager.
  Pager(DeviceBackend& backend, Resource& slots, Ledger& ledger, PagerOptions options = {});
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  /// Before the first pass. `name` is for messages; `bytes` is the size of the slot.
  std::int32_t add_block(std::string name, Bytes bytes, std::unique_ptr<BlockClient> client);

  BlockContents& contents() noexcept { return contents_; }
  Passes& passes() noexcept { return passes_; }

  /// Pins the block and makes it present. Pair with release(). Throws the load's error; then nothing is pinned.
  void acquire(std::int32_t block, AcquireReason reason);
  /// `block` as it was acquired; one that a pass has arrived at was acquired by a hook.
  void release(std::int32_t block, AcquireReason reason) noexcept;

  /// As SlotSupply::evict_one.
  bool evict_one(bool may_wait) { return supply_.evict_one(may_wait); }
  /// As SlotSupply::could_evict.
  bool could_evict() const { return supply_.could_evict(); }
  /// For good: forgets all pins, waits for the lanes, gives every slot back. Threads that are about to get a block
  /// give up with StateError.
  void close() noexcept;

  BlockState state(std::int32_t block) const;
  std::int64_t pins() const;
  Bytes resident_bytes() const;
  std::size_t blocks() const noexcept { return table_.all().size(); }
  PagerStatistics statistics() const;
  /// "h.3 12.00 MiB pinned, ...": what holds slots now, for messages.
  std::string describe_residents() const;

 private:
  DeviceBackend& backend_;
  BlockTable table_;
  BlockContents contents_;
  SlotSupply supply_;
  BlockFills fills_;
  Passes passes_;
};

}  // namespace hydra
