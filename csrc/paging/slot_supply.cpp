#include "csrc/paging/slot_supply.h"

#include <algorithm>
#include <exception>
#include <string>

#include "csrc/base/errors.h"

namespace hydra {

PagedBlock* SlotSupply::victim(const Lock& /*lock*/, bool spare_wanted) const noexcept {
  PagedBlock* best = nullptr;
  for (const auto& block : table_.all()) {
    if (!block->may_go() || (spare_wanted && block->outlook.wanted)) {
      continue;
    }
    if (best == nullptr || block->goes_before(*best)) {
      best = block.get();
    }
  }
  return best;
}

Slot SlotSupply::evict_victim(const Lock& lock, bool spare_wanted) {
  PagedBlock* const block = victim(lock, spare_wanted);
  if (block == nullptr) {
    return {};
  }
  block->place.uses().cover(backend_);
  if (block->place.state() != BlockState::kStale) {
    ++table_.statistics(lock).evictions;
  }
  Slot slot = block->place.give_up_slot();
  ++carried_;
  table_.note_change(lock);
  return slot;
}

bool SlotSupply::wait_for_movable(bool or_carried) {
  TicketPtr unfinished;
  bool dirty = false;
  {
    Lock lock = table_.lock();
    if (victim(lock, /*spare_wanted=*/false) != nullptr) {
      return true;  // since the caller looked
    }
    const auto& blocks = table_.all();
    const auto filling = std::find_if(blocks.begin(), blocks.end(), [](const auto& block) {
      // Had its fill ended before victim() looked, it would be the victim.
      return block->place.state() == BlockState::kLoading && block->pins == 0 && block->truth.is_on_host();
    });
    unfinished = filling != blocks.end() ? (*filling)->place.ticket() : nullptr;
    dirty = std::any_of(blocks.begin(), blocks.end(), [](const auto& block) { return block->is_to_go_home(); });
    if (!unfinished && !dirty && or_carried && carried_ > 0) {
      table_.wait_for_change(lock);
      return true;
    }
  }
  const ActivityRange range(backend_.activity(), ActivityRow::kCompute, ActivityKind::kWaitForRoom);
  const Stall stall(backend_.stalls());
  if (unfinished) {
    unfinished->wait_quietly();
  } else if (dirty) {
    contents_.write_back_dirty();
  }
  return unfinished != nullptr || dirty;
}

Slot SlotSupply::allocate(Bytes bytes) {
  {
    const Lock lock = table_.lock();
    ++carried_;
  }
  const Stall stall(backend_.stalls());  // a device that has to free memory first waits for all that runs
  Slot slot;
  try {
    slot.memory = slots_.allocate(bytes);
    slot.bytes = bytes;
    // Compute that is already enqueued may still use fresh memory: the lane waits for all of it.
    slot.fences.push_back(backend_.record());
  } catch (...) {  // re-raised
    put_down(slot);
    throw;
  }
  return slot;
}

bool SlotSupply::fits(const Demand& demand) const noexcept {
  return ledger_.in_use(MemoryClass::kWeights) <= demand.room - demand.bytes &&
         ledger_.in_use() <= ledger_.limit() - demand.bytes;
}

Slot SlotSupply::reserve(const Demand& demand, const PagedBlock& wanted) {
  for (;;) {
    std::exception_ptr refusal;
    if (fits(demand)) {
      try {
        return allocate(demand.bytes);
      } catch (const OutOfMemory&) {
        refusal = std::current_exception();
        ++refusals_;
      }
    }
    if (!demand.ahead && relief_.reliever && relief_.reliever()) {
      continue;
    }
    Slot slot;
    {
      const Lock lock = table_.lock();
      slot = evict_victim(lock, /*spare_wanted=*/demand.ahead);
    }
    if (slot.bytes == demand.bytes) {
      return slot;
    }
    if (slot.memory != nullptr) {
      put_down(slot);
      if (!demand.ahead || !refusal) {
        continue;
      }
    }
    if (!demand.ahead && (wait_for_movable(/*or_carried=*/true) || (relief_.last_resort && relief_.last_resort()))) {
      continue;
    }
    if (refusal) {
      std::rethrow_exception(refusal);
    }
    if (!demand.ahead && fits(demand)) {
      continue;  // another thread has given memory back meanwhile
    }
    throw OutOfMemory("no slot for block '" + wanted.name + "': it needs " + human_bytes(demand.bytes) + ", and " +
                      human_bytes(ledger_.in_use()) + " of " + human_bytes(ledger_.limit()) + " are in use");
  }
}

void SlotSupply::give_back(const Slot& slot) noexcept {
  backend_.slot_returns(slot.ticket.get(), slot.fences);
  slots_.release(slot.memory, slot.bytes);
}

void SlotSupply::put_down(const Slot& slot) noexcept {
  if (slot.memory != nullptr) {
    give_back(slot);
  }
  landed(table_.lock());
}

void SlotSupply::landed(const Lock& lock) noexcept {
  --carried_;
  table_.note_change(lock);
}

void SlotSupply::trim(Bytes room) {
  while (ledger_.in_use(MemoryClass::kWeights) > room) {
    Slot slot;
    {
      const Lock lock = table_.lock();
      slot = evict_victim(lock, /*spare_wanted=*/true);
    }
    if (slot.memory == nullptr) {
      return;
    }
    put_down(slot);
  }
}

bool SlotSupply::evict_one() {
  if (!table_.home().here()) {
    return false;
  }
  if (relief_.reliever && relief_.reliever()) {
    return true;
  }
  for (;;) {
    Slot slot;
    {
      const Lock lock = table_.lock();
      slot = evict_victim(lock, /*spare_wanted=*/false);
      if (slot.memory != nullptr) {
        ++table_.statistics(lock).spills;
      }
    }
    if (slot.memory != nullptr) {
      put_down(slot);
      return true;
    }
    if (!wait_for_movable(/*or_carried=*/false)) {
      return relief_.last_resort && relief_.last_resort();
    }
  }
}

}  // namespace hydra
