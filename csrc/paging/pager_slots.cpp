// The part of the pager that reserves slots for blocks and takes them away.
#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/paging/pager.h"

namespace hydra {

Pager::Block* Pager::victim_locked(bool spare_wanted) const noexcept {
  // Blocks that the plan does not want are evicted first, then stale ones, then the one that is needed last, then the
  // one that was used longest ago.
  const auto better = [](const Block& a, const Block& b) {
    if (a.wanted != b.wanted) {
      return b.wanted;
    }
    const bool a_stale = a.state == BlockState::kStale;
    const bool b_stale = b.state == BlockState::kStale;
    if (a_stale != b_stale) {
      return a_stale;
    }
    if (a.next_use != b.next_use) {
      return a.next_use > b.next_use;
    }
    return a.last_arrival < b.last_arrival;
  };
  Block* best = nullptr;
  for (const auto& candidate : blocks_) {
    Block& block = *candidate;
    const bool movable = block.state == BlockState::kPresent || block.state == BlockState::kStale ||
                         (block.state == BlockState::kLoading && block.ticket->finished());
    if (!movable || block.pins > 0 || block.dirty || block.settled || (spare_wanted && block.wanted)) {
      continue;
    }
    if (best == nullptr || better(block, *best)) {
      best = &block;
    }
  }
  return best;
}

TicketPtr Pager::unfinished_fill_locked() const noexcept {
  for (const auto& block : blocks_) {
    if (block->state == BlockState::kLoading && block->pins == 0 && !block->ticket->finished()) {
      return block->ticket;
    }
  }
  return nullptr;
}

bool Pager::wait_for_movable() {
  TicketPtr unfinished;
  bool dirty = false;
  {
    const std::lock_guard lock(mutex_);
    unfinished = unfinished_fill_locked();
    dirty = std::any_of(blocks_.begin(), blocks_.end(), [](const auto& block) {
      return block->dirty && block->pins == 0 && !block->settled && block->state == BlockState::kPresent;
    });
  }
  const ActivityRange range(backend_.activity(), ActivityRow::kCompute, ActivityKind::kWaitForRoom);
  if (unfinished) {
    unfinished->wait_quietly();
  } else if (dirty) {
    write_back_dirty();
  }
  return unfinished != nullptr || dirty;
}

void Pager::cover_uses_locked(Block& block) {
  if (block.used_since_fence) {
    block.last_uses.push_back(backend_.record());
    block.used_since_fence = false;
  }
}

void Pager::forget_reached_locked(Block& block) noexcept {
  std::erase_if(block.last_uses, [](const FencePtr& use) { return !use || use->reached(); });
}

Pager::Slot Pager::evict_locked(Block& block) {
  cover_uses_locked(block);
  if (block.state != BlockState::kStale) {
    ++statistics_.evictions;
  }
  return take_slot_locked(block);
}

Pager::Slot Pager::take_slot_locked(Block& block) noexcept {
  if (block.state == BlockState::kPresent) {
    block.client->withdraw();
  }
  Slot slot;
  slot.memory = std::exchange(block.slot, nullptr);
  slot.fences = std::exchange(block.last_uses, {});
  block.written = nullptr;  // it is among last_uses
  block.used_since_fence = false;
  block.ticket = nullptr;
  block.state = BlockState::kAbsent;
  changed_->notify_all();
  return slot;
}

Pager::Slot Pager::reserve(const Demand& demand, const Block& wanted) {
  for (;;) {
    std::exception_ptr refusal;
    const bool within_room = ledger_.in_use(MemoryClass::kWeights) <= demand.room - demand.bytes;
    if (within_room && ledger_.in_use() <= ledger_.limit() - demand.bytes) {
      try {
        // Compute that is already enqueued may still use fresh memory: the lane waits for all of it.
        void* memory = slots_.allocate(demand.bytes);
        return Slot{memory, {backend_.record()}};
      } catch (const OutOfMemory&) {
        refusal = std::current_exception();
      }
    }
    if (!demand.ahead && reliever_ && reliever_()) {
      continue;
    }
    Slot slot;
    Bytes bytes = 0;
    TicketPtr ticket;
    {
      const std::lock_guard lock(mutex_);
      if (Block* victim = victim_locked(demand.ahead)) {
        bytes = victim->bytes;
        ticket = victim->ticket;
        slot = evict_locked(*victim);
      }
    }
    if (bytes == demand.bytes) {
      return slot;
    }
    if (slot.memory != nullptr) {
      give_back(slot, bytes, ticket);
      continue;
    }
    if (!demand.ahead && (wait_for_movable() || (last_resort_ && last_resort_()))) {
      continue;
    }
    if (refusal) {
      std::rethrow_exception(refusal);
    }
    throw OutOfMemory("no slot for block '" + wanted.name + "': it needs " + human_bytes(demand.bytes) + ", and " +
                      human_bytes(ledger_.in_use()) + " of " + human_bytes(ledger_.limit()) + " are in use");
  }
}

void Pager::give_back(const Slot& slot, Bytes bytes, const TicketPtr& ticket) noexcept {
  backend_.slot_returns(ticket.get(), slot.fences);
  slots_.release(slot.memory, bytes);
}

void Pager::ensure_filling(Block& block, Priority priority, bool ahead, Bytes room) {
  constexpr const char* kClosed = "the offload context of this model has ended";
  {
    const std::lock_guard lock(mutex_);
    HYDRA_EXPECT(!closed_, StateError, kClosed);
    if (block.state == BlockState::kStale) {
      cover_uses_locked(block);
      start_fill_locked(block, priority, ahead);
      return;
    }
    if (block.state != BlockState::kAbsent) {
      return;
    }
    block.state = BlockState::kReserving;
  }
  Slot slot;
  try {
    slot = reserve({block.bytes, room, ahead}, block);
  } catch (...) {  // re-raised: nothing was reserved
    const std::lock_guard lock(mutex_);
    block.state = BlockState::kAbsent;
    changed_->notify_all();
    throw;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      block.slot = slot.memory;
      block.last_uses = std::move(slot.fences);
      start_fill_locked(block, priority, ahead);
      return;
    }
    block.state = BlockState::kAbsent;
    changed_->notify_all();
  }
  give_back(slot, block.bytes, nullptr);
  throw StateError(kClosed);
}

void Pager::start_fill_locked(Block& block, Priority priority, bool ahead) {
  // The block is stale if the lane refuses the job. last_uses stay until they are reached, for the next fill.
  block.state = BlockState::kStale;
  changed_->notify_all();
  Job job = block.client->fill(block.slot);
  job.priority = priority;
  job.label = {.block = block.index};
  job.fences = block.last_uses;
  const Bytes bytes = job.bytes();
  block.ticket = backend_.to_device().submit(std::move(job));
  block.state = BlockState::kLoading;
  ++statistics_.loads;
  statistics_.prefetched += ahead ? 1 : 0;
  statistics_.loaded_bytes += bytes;
}

void Pager::drop_failed_fill(Block& block, const TicketPtr& ticket) noexcept {
  const std::lock_guard lock(mutex_);
  if (block.ticket != ticket) {
    return;
  }
  if (block.state == BlockState::kPresent) {
    block.client->withdraw();
  }
  // The block keeps its slot, ticket and fences. It is the first to be evicted, or is filled again. A fence that could
  // not be recorded made this fill fail, and counts as reached.
  forget_reached_locked(block);
  block.state = BlockState::kStale;
  changed_->notify_all();
}

void Pager::trim(Bytes room) {
  while (ledger_.in_use(MemoryClass::kWeights) > room) {
    Slot slot;
    Bytes bytes = 0;
    TicketPtr ticket;
    {
      const std::lock_guard lock(mutex_);
      Block* victim = victim_locked(true);
      if (victim == nullptr) {
        return;
      }
      bytes = victim->bytes;
      ticket = victim->ticket;
      slot = evict_locked(*victim);
    }
    give_back(slot, bytes, ticket);
  }
}

void Pager::unpin_locked(Block& block) noexcept {
  if (block.pins > 0) {  // close() resets the count
    --block.pins;
  }
}

bool Pager::evict_one(bool may_wait) {
  if (!home_.here()) {
    return false;
  }
  if (may_wait && reliever_ && reliever_()) {
    return true;
  }
  for (;;) {
    Slot slot;
    Bytes bytes = 0;
    TicketPtr ticket;
    {
      std::unique_lock lock(mutex_, std::defer_lock);
      if (may_wait) {
        lock.lock();
      } else if (!lock.try_lock()) {
        return false;
      }
      if (Block* victim = victim_locked(false)) {
        bytes = victim->bytes;
        ticket = victim->ticket;
        slot = evict_locked(*victim);
        ++statistics_.spills;
      }
    }
    if (slot.memory != nullptr) {
      give_back(slot, bytes, ticket);
      return true;
    }
    if (!may_wait || !wait_for_movable()) {
      return may_wait && last_resort_ && last_resort_();
    }
  }
}

bool Pager::could_evict() const {
  const std::lock_guard lock(mutex_);
  return victim_locked(false) != nullptr;
}

void Pager::close() noexcept {
  if (!home_.here()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;  // from now on no fill begins
    changed_->notify_all();
  }
  backend_.to_device().drain();
  backend_.to_host().drain();
  for (const auto& block : blocks_) {
    Slot slot;
    {
      const std::lock_guard lock(mutex_);
      block->pins = 0;
      block->dirty = false;
      if (block->slot != nullptr) {
        try {
          cover_uses_locked(*block);
        } catch (const std::exception&) {
          // No host memory for a fence: compute on the device's main stream precedes the slot's next use anyway.
        }
        slot = take_slot_locked(*block);
      }
    }
    if (slot.memory != nullptr) {
      give_back(slot, block->bytes, nullptr);
    }
  }
}

}  // namespace hydra
