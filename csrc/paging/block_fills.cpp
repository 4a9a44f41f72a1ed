#include "csrc/paging/block_fills.h"

#include <optional>
#include <utility>

#include "csrc/base/clock.h"
#include "csrc/base/errors.h"

namespace hydra {

void BlockFills::begin(PagedBlock& block) { begin(block, {.bytes = block.place.bytes()}); }

void BlockFills::begin_ahead(const std::vector<std::int32_t>& wanted, std::optional<Bytes> room,
                             std::int64_t refusals) {
  if (!room) {
    return;
  }
  supply_.trim(*room);
  for (const std::int32_t index : missing(wanted)) {
    if (supply_.refusals() > refusals) {
      return;  // the blocks are fetched when the next use begins, or when they are needed
    }
    PagedBlock& block = table_.at(index);
    try {
      begin(block, {.bytes = block.place.bytes(), .room = *room, .ahead = true});
    } catch (const OutOfMemory&) {
      return;  // no room yet: the block is fetched when it is needed
    }
  }
}

std::vector<std::int32_t> BlockFills::missing(std::vector<std::int32_t> blocks) const {
  if (!blocks.empty()) {
    const Lock lock = table_.lock();
    std::erase_if(blocks, [this](std::int32_t index) { return table_.at(index).has_fill(); });
  }
  return blocks;
}

void BlockFills::begin(PagedBlock& block, const SlotSupply::Demand& demand) {
  constexpr const char* kClosed = "the offload context of this model has ended";
  {
    const Lock lock = table_.lock();
    HYDRA_EXPECT(!table_.is_closed(lock), StateError, kClosed);
    if (block.place.state() == BlockState::kStale) {
      block.place.uses().cover(backend_);
      start(lock, block, demand.ahead);
      return;
    }
    if (block.place.state() != BlockState::kAbsent) {
      return;
    }
    block.place.begin_reserving();
  }
  Slot slot;
  try {
    slot = supply_.reserve(demand, block);
  } catch (...) {  // re-raised: no slot was reserved
    const Lock lock = table_.lock();
    block.place.cancel_reserving();
    table_.note_change(lock);
    throw;
  }
  {
    const Lock lock = table_.lock();
    if (!table_.is_closed(lock)) {
      block.place.land(std::move(slot));
      supply_.landed(lock);
      start(lock, block, demand.ahead);
      return;
    }
    block.place.cancel_reserving();
    table_.note_change(lock);
  }
  supply_.put_down(slot);
  throw StateError(kClosed);
}

void BlockFills::start(const Lock& lock, PagedBlock& block, bool ahead) {
  table_.note_change(lock);  // even if the lane refuses: threads that wait for a slot go on
  const Bytes bytes =
      block.place.begin_filling(backend_.to_device(), ahead ? Priority::kPrefetch : Priority::kFault, block.index);
  block.last_fill = block.place.ticket();
  PagerStatistics& statistics = table_.statistics(lock);
  ++statistics.loads;
  statistics.prefetched += ahead ? 1 : 0;
  statistics.loaded_bytes += bytes;
}

void BlockFills::make_present(PagedBlock& block, AcquireReason reason) {
  wait_present(block, reason);
  follow_writes(block);
}

void BlockFills::wait_present(PagedBlock& block, AcquireReason reason) {
  BlockPlace& place = block.place;
  bool counted = false;
  double waited = 0.0;
  std::optional<ActivityRange> range;
  Lock lock = table_.lock();
  while (place.state() != BlockState::kPresent || place.ticket()) {
    if (place.state() != BlockState::kPresent && reason == AcquireReason::kFault && !counted) {
      HYDRA_EXPECT(serves_faults_, PageFaultError,
                   "block '" + block.name +
                       "' was read while absent and the fault path is off; "
                       "turn it on, or enter the block through its module");
      ++table_.statistics(lock).faults;
      counted = true;
    }
    if (place.state() == BlockState::kReserving) {
      table_.wait_for_change(lock);
      continue;
    }
    if (!range && !(place.ticket() && place.ticket()->finished())) {
      range.emplace(backend_.activity(), ActivityRow::kCompute,
                    reason == AcquireReason::kHook ? ActivityKind::kWaitForWeights : ActivityKind::kWaitForFault,
                    ActivityLabel{.block = block.index});
    }
    const Stopwatch watch(waited);
    const Stall stall(backend_.stalls());
    if (place.state() == BlockState::kAbsent || place.state() == BlockState::kStale) {
      lock.unlock();
      begin(block);
      lock.lock();
      continue;
    }
    const TicketPtr ticket = place.ticket();
    lock.unlock();
    try {
      backend_.compute_waits(*ticket);
    } catch (...) {  // re-raised
      drop_failed(block, ticket);
      throw;
    }
    const bool finished = ticket->finished();
    lock.lock();
    if (place.ticket() == ticket) {
      place.note_filled(/*has_ended=*/finished);
      table_.note_change(lock);
      if (!finished && place.state() == BlockState::kPresent) {
        break;  // this thread's compute waits on the device; the ticket stays for the compute of other threads
      }
    }
  }
  place.uses().note_use();
  PagerStatistics& statistics = table_.statistics(lock);
  (reason == AcquireReason::kHook ? statistics.hook_wait_seconds : statistics.fault_wait_seconds) += waited;
}

void BlockFills::follow_writes(PagedBlock& block) {
  FencePtr written;
  {
    const Lock lock = table_.lock();
    written = block.place.uses().written();
  }
  if (!written) {
    return;
  }
  backend_.compute_follows(written);
  if (written->reached()) {
    const Lock lock = table_.lock();
    if (block.place.uses().written() == written) {
      block.place.uses().forget_written();
    }
  }
}

void BlockFills::drop_failed(PagedBlock& block, const TicketPtr& ticket) noexcept {
  const Lock lock = table_.lock();
  if (block.place.ticket() != ticket) {
    return;
  }
  // The block keeps its slot, ticket and fences. It is the first to be evicted, or is filled again. A fence that could
  // not be recorded made this fill fail, and counts as reached.
  block.place.uses().forget_reached();
  block.place.become_stale();
  table_.note_change(lock);
}

}  // namespace hydra
