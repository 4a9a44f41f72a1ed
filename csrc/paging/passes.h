// The passes of a model, and what their order is good for: plans, and fills ahead of time.
//
// Each pass is recorded, and expected to run again as it was. At every arrival blocks are ranked by their next use, and
// those worth a slot within the room that activations leave are fetched. A plan is a hint: a wrong one costs loads.
//
// A part of the pager. Owns the trace; knows the table, and what fills blocks. Threads: any; the table's mutex guards
// the trace, the ranks and the counts here. begin(), arrive() and end() may block, so they must not be called with the
// interpreter lock held. In a forked child begin() and arrive() throw StateError, and end() does nothing. Sizes are
// bytes.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "csrc/paging/block_fills.h"
#include "csrc/paging/trace.h"

namespace hydra {

/// What a device's allocator has besides slots.
struct ActivationRoom {
  /// What activations took at most since the last call. The ledger's own count, and the gradients that leave, if empty.
  std::function<Bytes()> meter{};
  /// Room that plans leave free for gradients on their way out, where waiting for them would come too late.
  Bytes gradient_reserve = 0;
};

class Passes {
 public:
  /// All have to outlive it.
  Passes(DeviceBackend& backend, Ledger& ledger, BlockTable& table, BlockFills& fills, ActivationRoom activations)
      : backend_(backend), ledger_(ledger), table_(table), fills_(fills), activations_(std::move(activations)) {}
  Passes(const Passes&) = delete;
  Passes& operator=(const Passes&) = delete;

  void begin(PassKind kind, int version = 0);
  /// The pass uses `block` next: records it, fetches it, fetches ahead, pins it. Pair with Pager::release(), as after
  /// an acquire() by a hook. Throws the load's error; then nothing is pinned.
  void arrive(std::int32_t block);
  /// So many bytes of gradients leave while the block in use now is: slots leave room for them, as for its activations,
  /// in the passes to come. Else what the block allocates would wait for them.
  void note_leaving(Bytes gradients);
  /// Blocks until loads under way have ended. `completed`: the pass ran to its end without an error.
  void end(bool completed) noexcept;

  /// As Trace::recorded.
  std::vector<std::pair<std::int32_t, Bytes>> recorded(PassKind kind) const;

 private:
  using Lock = BlockTable::Lock;
  struct Plan {
    std::vector<std::int32_t> wanted{};  // nearest use first
    Bytes room = 0;                      // that all slots may take
  };

  /// What activations took at most since the last call.
  Bytes take_peak();
  /// Ranks blocks by the known future, and chooses among them.
  Plan plan(const Lock& lock);
  /// Blocks until all loads under way have ended; returns the seconds.
  double wait_for_fills() noexcept;

  DeviceBackend& backend_;
  Ledger& ledger_;
  BlockTable& table_;
  BlockFills& fills_;
  const ActivationRoom activations_;
  Trace trace_;
  std::int64_t arrivals_ = 0;
  Bytes gradients_leaving_ = 0;  // see note_leaving(); since the last arrival
};

}  // namespace hydra
