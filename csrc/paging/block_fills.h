// How blocks come into their slots: a fill is begun, on demand or ahead, and compute is made to wait for it.
//
// A part of the pager. Knows the table, and the supply that gives it slots; owns nothing. A block that is to become
// present is pinned by the caller.
//
// Threads: any; the table's mutex, which is held while a fill is submitted. One thread gets a block its slot; others
// wait for it. All calls may block, begin_ahead() but for a moment; none may be made with the interpreter lock held.
#pragma once

#include <vector>

#include "csrc/paging/slot_supply.h"

namespace hydra {

class BlockFills {
 public:
  /// All have to outlive it. `serves_faults` false: meeting an absent block throws PageFaultError.
  BlockFills(DeviceBackend& backend, BlockTable& table, SlotSupply& supply, bool serves_faults) noexcept
      : backend_(backend), table_(table), supply_(supply), serves_faults_(serves_faults) {}
  BlockFills(const BlockFills&) = delete;
  BlockFills& operator=(const BlockFills&) = delete;

  /// Starts a fill unless one runs or none is needed. Throws OutOfMemory, StateError once the table is closed, and the
  /// lane's error if it refuses the job.
  void begin(PagedBlock& block);
  /// Makes room for a plan that has blocks in it, and starts their fills, as long as there are slots within `room`.
  void begin_ahead(const std::vector<std::int32_t>& wanted, Bytes room);
  /// Blocks until the block is present and the calling thread's compute follows its fill, and other threads' writes to
  /// its slot. Notes a use of it. Throws the fill's error; then the block is stale.
  void make_present(PagedBlock& block, AcquireReason reason);

 private:
  using Lock = BlockTable::Lock;

  void begin(PagedBlock& block, const SlotSupply::Demand& demand);
  /// Into the block's slot, behind its last uses. On an error the block is stale.
  void start(const Lock& lock, PagedBlock& block, bool ahead);
  void wait_present(PagedBlock& block, AcquireReason reason);
  void follow_writes(PagedBlock& block);
  void drop_failed(PagedBlock& block, const TicketPtr& ticket) noexcept;

  DeviceBackend& backend_;
  BlockTable& table_;
  SlotSupply& supply_;
  const bool serves_faults_;
};

}  // namespace hydra
