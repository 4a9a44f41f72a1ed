// Fills blocks' slots, on demand or ahead of the use, and makes compute wait for the fills.
//
// A part of the pager. Uses the table, and the supply that reserves slots; owns no memory. The caller pins a block that
// it makes present.
//
// Threads: any; the table's mutex, which is held while a fill is submitted. One thread reserves a block's slot; other
// threads wait for it. begin() and make_present() may block; begin_ahead() waits for no lane. No call may be made with
// the interpreter lock held.
#pragma once

#include <optional>
#include <vector>

#include "csrc/paging/slot_supply.h"

namespace hydra {

class BlockFills {
 public:
  /// `serves_faults`: if false, an operation that meets an absent block throws PageFaultError. The others have to
  /// outlive the object.
  BlockFills(DeviceBackend& backend, BlockTable& table, SlotSupply& supply, bool serves_faults) noexcept
      : backend_(backend), table_(table), supply_(supply), serves_faults_(serves_faults) {}
  BlockFills(const BlockFills&) = delete;
  BlockFills& operator=(const BlockFills&) = delete;

  /// Starts a fill unless one is under way or none is needed. Throws OutOfMemory, StateError once the table is closed,
  /// and the lane's error if it refuses the job.
  void begin(PagedBlock& block);
  /// Makes room for the plan's wanted blocks, and starts their fills until no slot is left within `room`, or the device
  /// has refused more than `refusals` slots. Does nothing without a room, which is without a plan.
  void begin_ahead(const std::vector<std::int32_t>& wanted, std::optional<Bytes> room, std::int64_t refusals);
  /// How many slots the device has refused. The count before a use begins is what begin_ahead() takes.
  std::int64_t refusals() const noexcept { return supply_.refusals(); }
  /// Blocks until the block is present, and makes the calling thread's compute follow the fill and other compute's
  /// writes to the slot. Notes a use. Throws the fill's error; then the block is stale.
  void make_present(PagedBlock& block, AcquireReason reason);

 private:
  using Lock = BlockTable::Lock;

  /// Those of the blocks that have neither the host's bytes nor a fill under way.
  std::vector<std::int32_t> missing(std::vector<std::int32_t> blocks) const;
  void begin(PagedBlock& block, const SlotSupply::Demand& demand);
  /// Submits the fill of the block's slot, behind its last uses. On an error the block is stale.
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
