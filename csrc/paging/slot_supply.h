// Reserves slots for blocks and takes them away. A slot is fresh memory under the ledger's limit, or that of a block
// that is evicted.
//
// A part of the pager. Uses the table, and the contents, because dirty bytes are written back before their block is
// evicted. Owns no memory. A slot returns by give_back(), or changes hands when its block is evicted.
//
// A slot is carried from its eviction or allocation until it lands in a block or is given back. The table does not show
// a carried slot, so a reservation counts those of other threads before it says that there is no room.
//
// Threads: any; the table's mutex. The thread that holds it allocates and releases no memory, waits for no lane, and
// calls no function of Relief. So evict_one() may be called from inside an allocation. Calls may block. Sizes are
// bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>

#include "csrc/memory/ledger.h"
#include "csrc/memory/resource.h"
#include "csrc/paging/block_contents.h"
#include "csrc/paging/block_table.h"

namespace hydra {

/// Ways to make room outside the pager. Each returns whether it made room, and may be empty.
struct Relief {
  /// Called before a block is evicted for a use, or for an allocation outside the pager. It frees memory that costs no
  /// extra traffic (a gradient or a saved tensor that is leaving anyway).
  std::function<bool()> reliever{};
  /// Called when no block can be evicted. It moves a saved tensor, a settled block, or a part of one to the host.
  std::function<bool()> last_resort{};
};

class SlotSupply {
 public:
  using Lock = BlockTable::Lock;

  /// How far a reservation may go to get a slot.
  struct Demand {
    Bytes bytes = 0;
    Bytes room = std::numeric_limits<Bytes>::max();  // the most that all slots together may take afterwards
    bool ahead = false;                              // evicts only blocks that the plan does not want, and never waits
  };

  /// All have to outlive it.
  SlotSupply(DeviceBackend& backend, Resource& slots, Ledger& ledger, BlockTable& table, BlockContents& contents,
             Relief relief)
      : backend_(backend),
        slots_(slots),
        ledger_(ledger),
        table_(table),
        contents_(contents),
        relief_(std::move(relief)) {}
  SlotSupply(const SlotSupply&) = delete;
  SlotSupply& operator=(const SlotSupply&) = delete;

  /// Reserves a slot of exactly the demanded size. `wanted`: for messages. Throws OutOfMemory. On any error nothing is
  /// reserved. A reservation ahead asks the device for memory once. The caller carries the slot: landed() or put_down()
  /// ends that.
  Slot reserve(const Demand& demand, const PagedBlock& wanted);
  /// How often the device has refused memory within the ledger's limit. Each refusal may cost the device all memory
  /// that it kept for later.
  std::int64_t refusals() const noexcept { return refusals_.load(std::memory_order_relaxed); }
  /// A carried slot is in a block from now on.
  void landed(const Lock& lock) noexcept;
  /// Gives a carried slot back.
  void put_down(const Slot& slot) noexcept;
  /// Returns the slot to the device, in compute order.
  void give_back(const Slot& slot) noexcept;
  /// Evicts blocks that the plan does not want until all slots together take at most `room`.
  void trim(Bytes room);

  /// Makes room for an allocation outside the pager, from inside that allocation: calls the reliever, or evicts one
  /// unpinned block, or calls the last resort. False if no room can be made.
  bool evict_one();

 private:
  /// Whether the ledger has room for the demand.
  bool fits(const Demand& demand) const noexcept;
  /// A carried slot of fresh memory. On an error no memory is allocated.
  Slot allocate(Bytes bytes);
  /// The block to evict next; null if every block in a slot is pinned, dirty, settled, loading, or (with
  /// `spare_wanted`) wanted.
  PagedBlock* victim(const Lock& lock, bool spare_wanted) const noexcept;
  /// Takes the victim's slot for another use, and carries it. Returns no slot if there is no victim. On an error
  /// nothing has changed.
  Slot evict_victim(const Lock& lock, bool spare_wanted);
  /// Waits for a fill under way, or writes dirty blocks back, so that a block can be evicted. With `or_carried` it also
  /// waits for a slot that another thread carries; not from inside an allocation, which may be that thread's. False if
  /// there is none of these, and no victim.
  bool wait_for_movable(bool or_carried);

  DeviceBackend& backend_;
  Resource& slots_;
  Ledger& ledger_;
  BlockTable& table_;
  BlockContents& contents_;
  const Relief relief_;
  std::atomic<std::int64_t> refusals_{0};
  std::int64_t carried_ = 0;  // under the table's mutex
};

}  // namespace hydra
