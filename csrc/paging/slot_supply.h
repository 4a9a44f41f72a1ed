// Where slots come from: fresh memory under the ledger's limit, or a block that has to give up its own.
//
// A part of the pager. Knows the table, and the contents, since dirty bytes have to go home before their block can go;
// owns no memory. What it has handed out comes back by give_back() or in a block that is evicted.
//
// Threads: any; the table's mutex, which is free whenever memory is allocated or released, a lane is waited for or a
// function of Relief is called. So evict_one() may be called back from inside an allocation. Sizes are bytes.
#pragma once

#include <functional>
#include <limits>
#include <utility>

#include "csrc/memory/ledger.h"
#include "csrc/memory/resource.h"
#include "csrc/paging/block_contents.h"
#include "csrc/paging/block_table.h"

namespace hydra {

/// What others can do for room. Each says whether it did; either may be empty.
struct Relief {
  /// Asked before a slot is denied and before a block is evicted for an allocation outside the pager: frees something
  /// that costs no traffic (a gradient that is leaving).
  std::function<bool()> reliever{};
  /// Asked when nothing else can go: lets one settled block go, or something of it.
  std::function<bool()> last_resort{};
};

class SlotSupply {
 public:
  /// What a reservation may do to get a slot.
  struct Demand {
    Bytes bytes = 0;
    Bytes room = std::numeric_limits<Bytes>::max();  // all slots together may hold this much afterwards
    bool ahead = false;                              // takes only what the plan does not want, and never waits
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

  /// A slot of exactly that size, for `wanted`. Throws OutOfMemory; then nothing was reserved.
  Slot reserve(const Demand& demand, const PagedBlock& wanted);
  /// To the device, in compute order.
  void give_back(const Slot& slot) noexcept;
  /// Evicts what the plan does not want until all slots together hold `room` at most.
  void trim(Bytes room);

  /// Makes room for an allocation outside the pager, from inside it: relieves, or takes one unpinned block's slot.
  /// False when there is nothing left to take. `may_wait` false: never blocks, takes only what no lane and no other
  /// thread holds.
  bool evict_one(bool may_wait);
  /// Whether evict_one(false) would find a block to take now.
  bool could_evict() const;

 private:
  using Lock = BlockTable::Lock;

  /// The block to go next; null when all that is left is pinned, dirty, loading, or (`spare_wanted`) wanted.
  PagedBlock* victim(const Lock& lock, bool spare_wanted) const noexcept;
  /// Takes the victim's slot for a better use; no slot if there is no victim. On an error nothing has changed.
  Slot evict_victim(const Lock& lock, bool spare_wanted);
  /// Waits for a fill under way or brings dirty bytes home, so that a block can go. False when neither is there.
  bool wait_for_movable();

  DeviceBackend& backend_;
  Resource& slots_;
  Ledger& ledger_;
  BlockTable& table_;
  BlockContents& contents_;
  const Relief relief_;
};

}  // namespace hydra
