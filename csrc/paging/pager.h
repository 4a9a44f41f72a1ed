// The pager: which block is in which slot, what pins it, and what goes when room is needed.
//
// It decides and keeps count; bytes are moved by the backend's lanes. A block is fetched when it is acquired,
// or ahead of time when a pass runs in the order recorded before. Slots come from a resource under the run's
// ledger; when the ledger refuses, unpinned blocks go, the one that is needed last first.
//
// Threads: every call may come from any thread. Blocking calls (acquire, end_pass, write_back, close) must
// not be made with the interpreter lock held. Locking: one mutex; slot memory is never allocated or released
// and no lane is waited for while it is held, so evict_one() may be called back from inside an allocation.
// Unpinning means enqueued, not finished: each block remembers fences of its users, and the lane that
// overwrites its slot waits for them. In a forked child what would use a block throws StateError, and what would
// end a use, or the pager, does nothing.
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
  kReserving,  // a thread is getting it a slot; others wait
  kLoading,    // has a slot that a lane fills; pages not readable
  kPresent,    // pages readable; may be evicted when no pin holds it
  kStale,      // has a slot with bytes that are no longer the host's; pages not readable
};

/// Why a block was acquired: a hook that foresaw the use, or an operation that met it absent.
enum class AcquireReason : std::uint8_t { kHook, kFault };

struct PagerStatistics {
  std::int64_t loads = 0;       // all fills, whatever asked for them
  std::int64_t prefetched = 0;  // fills begun ahead of their use
  std::int64_t faults = 0;      // operations that met an absent block
  std::int64_t evictions = 0;   // slots taken from a block with valid bytes
  std::int64_t spills = 0;      // evictions asked for by allocations outside the pager
  std::int64_t write_backs = 0;
  std::int64_t order_changes = 0;  // passes that ran in another order than recorded
  Bytes loaded_bytes = 0;
  Bytes written_back_bytes = 0;
  double hook_wait_seconds = 0.0;   // compute waited for a block a hook had asked for
  double fault_wait_seconds = 0.0;  // compute waited for a block it met absent
  double drain_wait_seconds = 0.0;  // the end of a pass waited for loads under way
};

/// Snapshot of a slot, for readers outside the pager.
struct SlotContents {
  void* memory = nullptr;
  std::vector<FencePtr> uses;  // compute of other threads that may still write it
  std::int64_t writes = 0;     // calls of mark_dirty() so far; -1 while one may be under way
};

class Pager {
 public:
  /// `slots` hands out slot memory under `ledger`'s limit; both, and `backend`, have to outlive the pager.
  Pager(DeviceBackend& backend, Resource& slots, Ledger& ledger);
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  /// Before the first pass. `name` is for messages; `bytes` is the size of the slot.
  std::int32_t add_block(std::string name, Bytes bytes, std::unique_ptr<BlockClient> client);

  /// Asked before a slot is denied and before a block is evicted for an allocation outside the pager: frees
  /// something that costs no traffic (a gradient that is leaving) and says whether it did.
  void set_reliever(std::function<bool()> reliever) { reliever_ = std::move(reliever); }
  /// What activations took at most since the last call. The ledger's own count unless set.
  void set_activation_meter(std::function<Bytes()> meter) { activation_meter_ = std::move(meter); }
  /// Room that plans leave free for gradients on their way out, where waiting for them would come too late.
  void set_gradient_reserve(Bytes bytes) noexcept { gradient_reserve_ = bytes; }
  /// Asked when nothing else can go: lets one settled block go, or something of it, and says whether it did.
  void set_last_resort(std::function<bool()> last_resort) { last_resort_ = std::move(last_resort); }
  /// So many bytes of gradients leave while the block in use now is: slots leave room for them, as for its activations,
  /// in the passes to come. Else what the block allocates would wait for them.
  void note_leaving(Bytes gradients);
  /// Off: meeting an absent block throws PageFaultError.
  void set_fault_path(bool enabled) noexcept { fault_path_ = enabled; }

  void begin_pass(PassKind kind, int version = 0);
  /// Blocks until loads under way have ended. `completed`: the pass ran to its end without an error.
  void end_pass(bool completed) noexcept;

  /// The pass uses `block` next: records it, fetches it, fetches ahead, pins it. Pair with release().
  void arrive(std::int32_t block);
  /// Pins the block and makes it present. Pair with release(). Throws the load's error; then nothing is pinned.
  void acquire(std::int32_t block, AcquireReason reason);
  /// `block` as it was acquired.
  void release(std::int32_t block, AcquireReason reason) noexcept;

  /// The host's bytes have changed: what a slot holds is no longer valid.
  void invalidate(std::int32_t block);
  /// The block is acquired and keeps its slot, whose bytes are the truth, until unsettle(). Plans leave it and `beside`
  /// more bytes of the device to it.
  void settle(std::int32_t block, Bytes beside);
  /// Its bytes are home, as contents_of() told them. False, and nothing has changed, if they have been written since:
  /// they are to be read again. While compute is at it they are not; then the block is dirty.
  [[nodiscard]] bool unsettle(std::int32_t block, std::int64_t writes) noexcept;
  /// The settled block that is needed last; -1 when there is none.
  std::int32_t last_needed_settled() const;
  /// Of a block that is settled, or acquired.
  SlotContents contents_of(std::int32_t block) const;

  /// Compute up to `written` has written the slot of a block that is settled, or acquired: an acquirer follows it.
  void note_written(std::int32_t block, FencePtr written);
  /// The slot's bytes have changed: write_back_dirty() has to bring them home before the block can go.
  void mark_dirty(std::int32_t block);
  /// Blocks until the bytes of every dirty block that is not pinned are home.
  void write_back_dirty();

  /// Makes room for an allocation outside the pager, from inside it: relieves, or takes one unpinned block's
  /// slot. False when there is nothing left to take. `may_wait` false: never blocks, takes only what no lane
  /// and no other thread holds.
  bool evict_one(bool may_wait);
  /// Whether evict_one(false) would find a block to take now.
  bool could_evict() const;
  /// For good: forgets all pins, waits for the lanes, gives every slot back. Threads that are about to get a block
  /// give up with StateError.
  void close() noexcept;

  BlockState state(std::int32_t block) const;
  std::int64_t pins() const;
  Bytes resident_bytes() const;
  std::size_t blocks() const noexcept { return blocks_.size(); }
  PagerStatistics statistics() const;
  /// As Trace::recorded.
  std::vector<std::pair<std::int32_t, Bytes>> recorded(PassKind kind) const;
  /// "h.3 12.00 MiB pinned, ...": what holds slots now, for messages.
  std::string describe_residents() const;

 private:
  struct Block {
    std::int32_t index = 0;
    std::string name;
    Bytes bytes = 0;
    std::unique_ptr<BlockClient> client;
    BlockState state = BlockState::kAbsent;
    void* slot = nullptr;
    TicketPtr ticket;                 // of the last fill; null once known to have ended
    std::vector<FencePtr> last_uses;  // compute that may still read the slot
    FencePtr written;                 // compute that may still write it, other than its users'; null once reached
    bool used_since_fence = false;
    bool dirty = false;
    bool settled = false;
    Bytes beside = 0;         // settled: what else the device holds for it
    std::int64_t writes = 0;  // calls of mark_dirty()
    std::int32_t pins = 0;
    std::int64_t next_use = 0;  // rank in the known future; kNever when unknown
    bool wanted = false;        // the plan keeps it in, or brings it into, a slot
    std::int64_t last_arrival = 0;
  };
  struct Slot {
    void* memory = nullptr;
    std::vector<FencePtr> fences;
  };
  /// What a reservation may do to get a slot.
  struct Demand {
    Bytes bytes = 0;
    Bytes room = 0;      // all slots together may hold this much afterwards
    bool ahead = false;  // takes only what the plan does not want, and never waits
  };
  static constexpr std::int64_t kNever = std::int64_t{1} << 62;

  Block& at(std::int32_t block) const;
  // Names that end in _locked are called with mutex_ held; the others must not be.
  /// The block to go next; null when all that is left is pinned, dirty, loading, or (`spare_wanted`) wanted.
  Block* victim_locked(bool spare_wanted) const noexcept;
  TicketPtr unfinished_fill_locked() const noexcept;
  /// Brings last_uses up to date. On an error nothing has changed.
  void cover_uses_locked(Block& block);
  /// Takes the slot for a better use. On an error nothing has changed.
  Slot evict_locked(Block& block);
  Slot take_slot_locked(Block& block) noexcept;
  void unpin_locked(Block& block) noexcept;
  void forget_reached_locked(Block& block) noexcept;
  /// Into the block's slot, behind its last uses. On an error the block is stale.
  void start_fill_locked(Block& block, Priority priority, bool ahead);
  /// Ranks blocks by the known future; which to fetch, nearest use first, and the room all slots may take.
  std::vector<std::int32_t> plan_locked(Bytes& room);

  Slot reserve(const Demand& demand, const Block& wanted);
  /// Waits for a fill under way or brings dirty bytes home, so that a block can go. False when neither is there.
  bool wait_for_movable();
  void give_back(const Slot& slot, Bytes bytes, const TicketPtr& ticket) noexcept;
  /// Starts a fill unless one runs or none is needed. `room`: as Demand::room.
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
  Bytes gradients_leaving_ = 0;  // see note_leaving(); since the last arrival
  bool closed_ = false;
  PagerStatistics statistics_;
};

}  // namespace hydra
