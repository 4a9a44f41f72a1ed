// How the pager gets slots, and how blocks lose them.
#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/paging/pager.h"

namespace hydra {

Pager::Block* Pager::victim_locked(bool spare_wanted) const noexcept {
  // What the plan does not want goes first, then worthless bytes, then what is needed last, then what was used
  // longest ago.
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
    if (!movable || block.pins > 0 || block.dirty || (spare_wanted && block.wanted)) {
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
      return block->dirty && block->pins == 0 && block->state == BlockState::kPresent;
    });
  }
  if (unfinished) {
    unfinished->wait_quietly();
  } else if (dirty) {
    write_back_dirty();
  }
  return unfinished != nullptr || dirty;
}

Pager::Slot Pager::take_slot_locked(Block& block) {
  if (block.state == BlockState::kPresent) {
    block.client->withdraw();
  }
  if (block.state != BlockState::kStale) {
    ++statistics_.evictions;
  }
  Slot slot;
  slot.memory = std::exchange(block.slot, nullptr);
  slot.fences = std::exchange(block.last_uses, {});
  if (block.used_since_fence) {
    slot.fences.push_back(backend_.record());
    block.used_since_fence = false;
  }
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
        // Fresh memory may have had another use before: the lane waits for all that is enqueued.
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
        slot = take_slot_locked(*victim);
      }
    }
    if (bytes == demand.bytes) {
      return slot;
    }
    if (slot.memory != nullptr) {
      give_back(slot, bytes, ticket);
      continue;
    }
    if (!demand.ahead && wait_for_movable()) {
      continue;
    }
    if (refusal) {
      std::rethrow_exception(refusal);
    }
    throw OutOfMemory("no slot for block '" + wanted.name + "': " + human_bytes(demand.bytes) + " asked, " +
                      human_bytes(ledger_.in_use()) + " of " + human_bytes(ledger_.limit()) + " in use");
  }
}

void Pager::give_back(const Slot& slot, Bytes bytes, const TicketPtr& ticket) noexcept {
  backend_.slot_returns(ticket.get(), slot.fences);
  slots_.release(slot.memory, bytes);
}

void Pager::ensure_filling(Block& block, Priority priority, bool ahead, Bytes room) {
  Slot slot;
  {
    const std::lock_guard lock(mutex_);
    if (block.state == BlockState::kStale) {
      slot.memory = block.slot;
      slot.fences = std::exchange(block.last_uses, {});
      if (block.used_since_fence) {
        slot.fences.push_back(backend_.record());
        block.used_since_fence = false;
      }
      start_fill_locked(block, std::move(slot), priority, ahead);
      return;
    }
    if (block.state != BlockState::kAbsent) {
      return;
    }
    block.state = BlockState::kReserving;
  }
  try {
    slot = reserve({block.bytes, room, ahead}, block);
  } catch (...) {  // re-raised: nothing was reserved
    const std::lock_guard lock(mutex_);
    block.state = BlockState::kAbsent;
    changed_->notify_all();
    throw;
  }
  const std::lock_guard lock(mutex_);
  start_fill_locked(block, std::move(slot), priority, ahead);
}

void Pager::start_fill_locked(Block& block, Slot slot, Priority priority, bool ahead) {
  block.slot = slot.memory;
  block.state = BlockState::kStale;  // what it is if the lane refuses the job
  Job job = block.client->fill(slot.memory);
  job.priority = priority;
  job.fences = std::move(slot.fences);
  const Bytes bytes = job.bytes();
  block.ticket = backend_.to_device().submit(std::move(job));
  block.state = BlockState::kLoading;
  ++statistics_.loads;
  statistics_.prefetched += ahead ? 1 : 0;
  statistics_.loaded_bytes += bytes;
  changed_->notify_all();
}

void Pager::drop_failed_fill(Block& block, const TicketPtr& ticket) noexcept {
  void* memory = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (block.ticket != ticket) {
      return;
    }
    if (block.state == BlockState::kPresent) {
      block.client->withdraw();
    }
    memory = std::exchange(block.slot, nullptr);
    block.ticket = nullptr;
    block.last_uses.clear();
    block.state = BlockState::kAbsent;
    changed_->notify_all();
  }
  slots_.release(memory, block.bytes);
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
        slot = take_slot_locked(*victim);
        ++statistics_.spills;
      }
    }
    if (slot.memory != nullptr) {
      give_back(slot, bytes, ticket);
      return true;
    }
    if (!may_wait || !wait_for_movable()) {
      return false;
    }
  }
}

void Pager::close() noexcept {
  if (!home_.here()) {
    return;
  }
  backend_.to_device().drain();
  backend_.to_host().drain();
  std::vector<std::pair<Slot, Bytes>> slots;
  {
    const std::lock_guard lock(mutex_);
    const std::int64_t evictions = statistics_.evictions;
    for (const auto& block : blocks_) {
      block->pins = 0;
      block->dirty = false;
      if (block->slot != nullptr) {
        slots.emplace_back(take_slot_locked(*block), block->bytes);
      }
    }
    statistics_.evictions = evictions;  // nobody needed the room
  }
  for (const auto& [slot, bytes] : slots) {
    give_back(slot, bytes, nullptr);
  }
}

}  // namespace hydra
