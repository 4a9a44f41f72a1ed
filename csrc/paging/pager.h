// The pager: decides which block is in which slot, counts pins, and chooses the block to evict when room is needed.
//
// It decides and counts; the backend's lanes move the bytes. A block is fetched when it is acquired, or ahead of time
// when a pass runs in the recorded order. Slots come from a resource under the run's ledger; when the ledger refuses,
// unpinned blocks are evicted, the one that is needed last first.
//
// Threads: every call may come from any thread. Calls that may block (arrive, acquire, invalidate, end_pass,
// write_back_dirty, evict_one, close) must not be made with the interpreter lock held.
// Locking: one mutex. The thread that holds it allocates and releases no slot memory, and waits for no lane. So
// evict_one() may be called from inside an allocation.
//
// A block may be unpinned while its users' compute is enqueued but not finished. It remembers their fences, and the
// lane that overwrites its slot waits for them. In a forked child, calls that would use a block throw StateError; calls
// that would end a use, or the pager, do nothing.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/memory/ledger.h"
#include "csrc/paging/block_client.h"
#include "csrc/paging/trace.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

enum class BlockState : std::uint8_t {
  kAbsent,     // no slot; reading its pages raises
  kReserving,  // a thread is reserving a slot for it; other threads wait
  kLoading,    // a lane fills its slot; pages not readable
  kPresent,    // pages readable; may be evicted while it is not pinned
  kStale,      // the bytes in its slot are no longer the host's; pages not readable
};

/// Why a block was acquired: by a hook that foresaw the use, or by an operation on a device parameter.
enum class AcquireReason : std::uint8_t { kHook, kFault };

struct PagerStatistics {
  std::int64_t loads = 0;       // all fills, for any reason
  std::int64_t prefetched = 0;  // fills begun ahead of their use
  std::int64_t faults = 0;      // operations that met an absent block
  std::int64_t evictions = 0;   // slots taken from a block with valid bytes
  std::int64_t spills = 0;      // evictions for allocations outside the pager
  std::int64_t write_backs = 0;
  std::int64_t order_changes = 0;  // passes whose order differed from the recorded one
  Bytes loaded_bytes = 0;
  Bytes written_back_bytes = 0;
  double hook_wait_seconds = 0.0;   // compute waited for a block that a hook had acquired
  double fault_wait_seconds = 0.0;  // compute waited for a block that it met absent
  double drain_wait_seconds = 0.0;  // the end of a pass waited for loads under way
};

/// A snapshot of a slot for readers outside the pager.
struct SlotContents {
  void* memory = nullptr;
  std::vector<FencePtr> uses;  // compute that may still use the slot: a reader waits for it
  std::int64_t writes = 0;     // calls of mark_dirty() so far; -1 while one may be under way
};

class Pager {
 public:
  /// `slots`: allocates slot memory under `ledger`'s limit. All three have to outlive the pager.
  Pager(DeviceBackend& backend, Resource& slots, Ledger& ledger);
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  /// Adds a block, before the first pass. `name`: for messages. `bytes`: the size of its slot.
  std::int32_t add_block(std::string name, Bytes bytes, std::unique_ptr<BlockClient> client);

  /// `reliever` is called before a block is evicted for a use, or for an allocation outside the pager. It frees memory
  /// that costs no extra traffic (a gradient that is leaving anyway), and returns whether it did.
  void set_reliever(std::function<bool()> reliever) { reliever_ = std::move(reliever); }
  /// `meter` returns the most that activations took since its last call. By default the ledger's count is used.
  void set_activation_meter(std::function<Bytes()> meter) { activation_meter_ = std::move(meter); }
  /// Room that plans leave free for gradients on their way out, where waiting for them would come too late.
  void set_gradient_reserve(Bytes bytes) noexcept { gradient_reserve_ = bytes; }
  /// `last_resort` is called when no block can be evicted. It moves a settled block, or a part of it, to the host, and
  /// returns whether it did.
  void set_last_resort(std::function<bool()> last_resort) { last_resort_ = std::move(last_resort); }
  /// Notes gradients that leave while the block in use now is in use. In later passes slots leave room for them, as for
  /// the block's activations; otherwise the block's allocations would wait for them.
  void note_leaving(Bytes gradients);
  /// `enabled`: if false, an operation that meets an absent block throws PageFaultError.
  void set_fault_path(bool enabled) noexcept { fault_path_ = enabled; }

  void begin_pass(PassKind kind, int version = 0);
  /// Blocks until loads under way have ended. `completed`: whether the pass ran to its end without an error.
  void end_pass(bool completed) noexcept;

  /// The pass uses `block` next: records it, fetches it, fetches ahead, pins it. Pair with release().
  void arrive(std::int32_t block);
  /// Pins the block and makes it present. Pair with release(). Throws the load's error; then nothing is pinned.
  void acquire(std::int32_t block, AcquireReason reason);
  /// Ends one arrive() or acquire(). `reason`: that of the acquisition; kHook for arrive().
  void release(std::int32_t block, AcquireReason reason) noexcept;

  /// The host's bytes have changed: the block's slot, if it has one, becomes stale.
  void invalidate(std::int32_t block);
  /// An acquired block keeps its slot, whose bytes are the truth, until unsettle(). Plans reserve the slot, and
  /// `beside` more bytes of the device, for it.
  void settle(std::int32_t block, Bytes beside);
  /// The block's bytes have reached the host as contents_of() gave them, with its `writes`. If the slot was written
  /// since, the result depends on pins. Without one, returns false and changes nothing: the caller has to read the slot
  /// again. With one, the block unsettles and stays dirty.
  [[nodiscard]] bool unsettle(std::int32_t block, std::int64_t writes) noexcept;
  /// The settled block that is needed last; -1 if none is settled.
  std::int32_t last_needed_settled() const;
  /// The slot of a block that is settled or acquired.
  SlotContents contents_of(std::int32_t block) const;

  /// Compute up to `written` writes the slot of a settled or acquired block: later acquirers wait for it.
  void note_written(std::int32_t block, FencePtr written);
  /// The slot's bytes have changed: write_back_dirty() has to bring them home before the block can be evicted.
  void mark_dirty(std::int32_t block);
  /// Blocks until the bytes of every dirty block that is not pinned are home.
  void write_back_dirty();

  /// Makes room for an allocation outside the pager, from inside that allocation: calls the reliever, or evicts one
  /// unpinned block. False if no room can be made. `may_wait`: if false, the call never blocks, and evicts only a block
  /// that neither a lane nor another thread holds.
  bool evict_one(bool may_wait);
  /// Whether evict_one(false) would find a block to evict now.
  bool could_evict() const;
  /// Closes the pager for good: forgets all pins, waits for the lanes, returns every slot. Threads that are about to
  /// get a slot throw StateError.
  void close() noexcept;

  BlockState state(std::int32_t block) const;
  std::int64_t pins() const;
  Bytes resident_bytes() const;
  std::size_t blocks() const noexcept { return blocks_.size(); }
  PagerStatistics statistics() const;
  /// See Trace::recorded().
  std::vector<std::pair<std::int32_t, Bytes>> recorded(PassKind kind) const;
  /// "'h.3' 12.00 MiB in use, ...": the blocks that have slots now, for messages.
  std::string describe_residents() const;

 private:
  struct Block {
    std::int32_t index = 0;
    std::string name;
    Bytes bytes = 0;
    std::unique_ptr<BlockClient> client;
    BlockState state = BlockState::kAbsent;
    void* slot = nullptr;
    TicketPtr ticket;                 // the last fill; null once it is known to have ended
    std::vector<FencePtr> last_uses;  // compute that may still use the slot
    FencePtr written;                 // compute other than its users' that may still write the slot; null once reached
    bool used_since_fence = false;
    bool dirty = false;
    bool settled = false;
    Bytes beside = 0;         // while settled: other bytes that the device holds for it
    std::int64_t writes = 0;  // calls of mark_dirty()
    std::int32_t pins = 0;
    std::int64_t next_use = 0;  // index in the expected uses; kNever if none is expected
    bool wanted = false;        // the plan keeps it in a slot, or brings it into one
    std::int64_t last_arrival = 0;
  };
  struct Slot {
    void* memory = nullptr;
    std::vector<FencePtr> fences;
  };
  /// How far a reservation may go to get a slot.
  struct Demand {
    Bytes bytes = 0;
    Bytes room = 0;      // the most that all slots together may take afterwards
    bool ahead = false;  // evicts only blocks that the plan does not want, and never waits
  };
  static constexpr std::int64_t kNever = std::int64_t{1} << 62;

  Block& at(std::int32_t block) const;
  // Functions whose names end in _locked are called with mutex_ held, the others without it.
  /// The block to evict next; null if every block in a slot is pinned, dirty, settled, loading, or (with
  /// `spare_wanted`) wanted.
  Block* victim_locked(bool spare_wanted) const noexcept;
  TicketPtr unfinished_fill_locked() const noexcept;
  /// Adds a fence for uses that last_uses does not cover yet. On an error nothing has changed.
  void cover_uses_locked(Block& block);
  /// Takes the block's slot for another use. On an error nothing has changed.
  Slot evict_locked(Block& block);
  Slot take_slot_locked(Block& block) noexcept;
  void unpin_locked(Block& block) noexcept;
  void forget_reached_locked(Block& block) noexcept;
  /// Submits the fill of the block's slot, behind its last uses. On an error the block is stale.
  void start_fill_locked(Block& block, Priority priority, bool ahead);
  /// Ranks blocks by their expected uses. Returns the wanted blocks, nearest use first, and in `room` the bytes that
  /// all slots may take.
  std::vector<std::int32_t> plan_locked(Bytes& room);

  Slot reserve(const Demand& demand, const Block& wanted);
  /// Waits for a fill under way, or writes dirty blocks back, so that a block can be evicted. False if there is
  /// neither.
  bool wait_for_movable();
  void give_back(const Slot& slot, Bytes bytes, const TicketPtr& ticket) noexcept;
  /// Starts a fill unless one is under way or none is needed. `room`: see Demand.
  void ensure_filling(Block& block, Priority priority, bool ahead, Bytes room);
  void fetch_ahead(const std::vector<std::int32_t>& wanted, Bytes room);
  void trim(Bytes room);
  void wait_present(Block& block, AcquireReason reason);
  void follow_writes(Block& block);
  void drop_failed_fill(Block& block, const TicketPtr& ticket) noexcept;
  Bytes activation_peak();

  DeviceBackend& backend_;
  Resource& slots_;
  Ledger& ledger_;
  std::function<bool()> reliever_;
  std::function<bool()> last_resort_;
  std::function<Bytes()> activation_meter_;
  Bytes gradient_reserve_ = 0;
  bool fault_path_ = true;

  const HomeProcess home_;
  mutable std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Bytes> slot_bytes_;
  Trace trace_;
  std::int64_t arrivals_ = 0;
  Bytes gradients_leaving_ = 0;  // noted by note_leaving() since the last arrival
  bool closed_ = false;
  PagerStatistics statistics_;
};

}  // namespace hydra
