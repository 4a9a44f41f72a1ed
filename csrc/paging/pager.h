// The pager: decides which block is in which slot, counts pins, and chooses the block to evict when room is needed.
//
// It decides and counts; the backend's lanes move the bytes. A block is fetched when it is acquired, or ahead of time
// when a pass runs in the recorded order. Slots come from a resource under the run's ledger; when the ledger refuses,
// unpinned blocks are evicted, the one that is needed last first.
//
// It owns its parts: blocks (block_table.h), their contents (block_contents.h), the supply of slots (slot_supply.h),
// fills (block_fills.h) and passes (passes.h). A part refers only to parts before it. Callers get the contents and the
// passes; the other parts are private.
//
// Threads: every call may come from any thread. Calls that may block (acquire, evict_one, close, and those that the
// parts name) must not be made with the interpreter lock held.
// Locking: one mutex, the table's. The thread that holds it allocates and releases no slot memory, and waits for no
// lane. So evict_one() may be called from inside an allocation.
//
// A block may be unpinned while its users' compute is enqueued but not finished. Its slot has their fences (slot.h),
// and the lane that overwrites the slot waits for them. In a forked child, calls that would use a block throw
// StateError; calls that would end a use, or the pager, do nothing.
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
  bool fault_path = true;  // if false, an operation that meets an absent block throws PageFaultError
};

class Pager {
 public:
  /// `slots`: allocates slot memory under `ledger`'s limit. All but `options` have to outlive the pager.
  Pager(DeviceBackend& backend, Resource& slots, Ledger& ledger, PagerOptions options = {});
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  /// Adds a block, before the first pass. `name`: for messages. `bytes`: the size of its slot. Returns its number.
  std::int32_t add_block(std::string name, Bytes bytes, std::unique_ptr<BlockClient> client);

  BlockContents& contents() noexcept { return contents_; }
  Passes& passes() noexcept { return passes_; }

  /// Pins the block and makes it present. Pair with release(). Throws the load's error; then nothing is pinned.
  void acquire(std::int32_t block, AcquireReason reason);
  /// Ends one acquire() or Passes::arrive(). `reason`: that of the acquisition; kHook for an arrival.
  void release(std::int32_t block, AcquireReason reason) noexcept;

  /// See SlotSupply::evict_one().
  bool evict_one() { return supply_.evict_one(); }
  /// Closes the pager for good: forgets all pins, waits for the lanes, returns every slot. Threads that are about to
  /// get a slot throw StateError.
  void close() noexcept;

  BlockState state(std::int32_t block) const;
  std::int64_t pins() const;
  Bytes resident_bytes() const;
  std::size_t blocks() const noexcept { return table_.all().size(); }
  PagerStatistics statistics() const;
  /// "'h.3' 12.00 MiB in use, ...": the blocks that have slots now, for messages.
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
