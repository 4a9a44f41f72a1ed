// Records the passes of a model, and plans from the recorded order which blocks to fetch ahead of time.
//
// Each pass is recorded, and expected to run again in that order. Every arrival ranks the blocks by their next use. The
// blocks that are worth a slot within the room that activations leave are fetched. Where all have theirs already, a
// plan stands from one arrival to the next. A plan is a hint: a wrong one costs loads.
//
// A part of the pager. Owns the trace; uses the table and the fills. Threads: any; the table's mutex guards the trace,
// the ranks and the counts here. begin(), arrive() and end() may block, so they must not be called with the interpreter
// lock held. In a forked child begin() and arrive() throw StateError, and end() does nothing. Sizes are bytes.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/paging/block_fills.h"
#include "csrc/paging/residency.h"
#include "csrc/paging/trace.h"

namespace hydra {

/// The device memory that plans leave to activations and gradients.
struct ActivationRoom {
  /// Returns the most that activations took since its last call. If empty, the ledger's count is used, with the
  /// gradients of Passes::note_leaving().
  std::function<Bytes()> meter{};
  /// Room that plans leave free for gradients on their way out, where the meter counts them as activations.
  Bytes gradient_reserve = 0;
  /// Room that plans leave free because the device's allocator may not be able to use all memory.
  Bytes slack = 0;
};

/// The memory that a plan divides.
struct PlannedMemory {
  /// Reads the settled blocks. `limit`: all memory.
  static PlannedMemory of(const BlockTable& table, Bytes limit) noexcept;
  bool operator==(const PlannedMemory&) const = default;

  Bytes limit = 0;
  Bytes settled = 0;  // in slots of settled blocks, which keep them under any plan
  Bytes beside = 0;   // beside those slots
};

/// A plan that stands: all blocks of the future are in slots, and there is room for all of them at every moment. An
/// arrival that was foreseen then changes nothing but the rank of the block before it, and planning anew would find the
/// same. So the plan goes on until a block has lost its slot, the pass leaves its order, or memory has changed. Not
/// thread-safe: the table's mutex guards it.
class StandingPlan {
 public:
  /// Takes the future over if it is such a one: blocks in it are marked as wanted, and their next uses are its indices.
  /// `future[0]` is the use now, or with `is_ahead` the first one to come.
  void set(const BlockTable& table, const PlannedMemory& memory, std::vector<Use> future, bool is_ahead);
  void drop() noexcept { future_.clear(); }
  /// If the plan stands and `block` is its next use, ranks the block before it by its next use, and returns the room of
  /// the present use. Otherwise the plan falls.
  std::optional<Bytes> go_on(const BlockTable& table, const PlannedMemory& memory, std::int32_t block);

 private:
  bool stands(const BlockTable& table) const noexcept;

  std::vector<Use> future_;  // empty if no plan stands
  std::size_t next_ = 0;     // index of the next use
  PlannedMemory memory_;
};

class Passes {
 public:
  /// All but `activations` have to outlive the object.
  Passes(DeviceBackend& backend, Ledger& ledger, BlockTable& table, BlockFills& fills, ActivationRoom activations)
      : backend_(backend), ledger_(ledger), table_(table), fills_(fills), activations_(std::move(activations)) {}
  Passes(const Passes&) = delete;
  Passes& operator=(const Passes&) = delete;

  /// Throws StateError if the calling thread must not use a block now (DeviceBackend::expect_usable), or in a forked
  /// child.
  void expect_usable();
  void begin(PassKind kind, int version = 0);
  /// The pass uses `block` next: records it, fetches it, fetches ahead, pins it. Pair with Pager::release() for kHook.
  /// Throws the load's error; then nothing is pinned.
  void arrive(std::int32_t block);
  /// Notes gradients that leave while the block in use now is in use. In later passes slots leave room for them, as for
  /// the block's activations; otherwise the block's allocations would wait for them.
  void note_leaving(Bytes gradients);
  /// Blocks until loads under way have ended: the host's bytes may be written from then on. `completed`: whether the
  /// pass ran to its end without an error.
  void end(bool completed) noexcept;

  /// See Trace::forget_activations().
  void forget_activations();
  /// See Trace::recorded().
  std::vector<std::pair<std::int32_t, Bytes>> recorded(PassKind kind) const;

 private:
  using Lock = BlockTable::Lock;
  struct Plan {
    std::vector<std::int32_t> wanted{};  // blocks to fetch, nearest use first; none if all have been
    std::optional<Bytes> room{};         // the bytes that all slots may take; null without a plan
  };

  /// The most that activations took since the last call.
  Bytes take_peak();
  /// The plan for the use of `block` that begins now. The trace has noted it.
  Plan plan_use(const Lock& lock, std::int32_t block);
  /// Ranks blocks by their expected uses, and chooses the wanted ones. `is_ahead`: the first use is yet to come.
  Plan plan(const Lock& lock, const PlannedMemory& memory, bool is_ahead);
  /// Blocks until all loads under way have ended. Returns the seconds that it took.
  double wait_for_fills() noexcept;

  DeviceBackend& backend_;
  Ledger& ledger_;
  BlockTable& table_;
  BlockFills& fills_;
  const ActivationRoom activations_;
  Trace trace_;
  StandingPlan standing_;
  std::int64_t arrivals_ = 0;
  Bytes gradients_leaving_ = 0;  // noted by note_leaving() since the last arrival
};

}  // namespace hydra
