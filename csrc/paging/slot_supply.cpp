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
  table_.note_change(lock);
  return slot;
}

bool SlotSupply::wait_for_movable() {
  TicketPtr unfinished;
  bool dirty = false;
  {
    const Lock lock = table_.lock();
    const auto& blocks = table_.all();
    const auto filling = std::find_if(blocks.begin(), blocks.end(), [](const auto& block) {
      return block->place.state() == BlockState::kLoading && block->pins == 0 && !block->place.ticket()->finished();
    });
    unfinished = filling != blocks.end() ? (*filling)->place.ticket() : nullptr;
    dirty = std::any_of(blocks.begin(), blocks.end(), [](const auto& block) { return block->is_to_go_home(); });
  }
  const ActivityRange range(backend_.activity(), ActivityRow::kCompute, ActivityKind::kWaitForRoom);
  if (unfinished) {
    unfinished->wait_quietly();
  } else if (dirty) {
    contents_.write_back_dirty();
  }
  return unfinished != nullptr || dirty;
}

Slot SlotSupply::allocate(Bytes bytes) {
  Slot slot{.memory = slots_.allocate(bytes), .bytes = bytes};
  try {
    // Compute that is already enqueued may still use fresh memory: the lane waits for all of it.
    slot.fences.push_back(backend_.record());
  } catch (...) {  // re-raised
    give_back(slot);
    throw;
  }
  return slot;
}

Slot SlotSupply::reserve(const Demand& demand, const PagedBlock& wanted) {
  for (;;) {
    std::exception_ptr refusal;
    const bool within_room = ledger_.in_use(MemoryClass::kWeights) <= demand.room - demand.bytes;
    if (within_room && ledger_.in_use() <= ledger_.limit() - demand.bytes) {
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
      give_back(slot);
      if (!demand.ahead || !refusal) {
        continue;
      }
    }
    if (!demand.ahead && (wait_for_movable() || (relief_.last_resort && relief_.last_resort()))) {
      continue;
    }
    if (refusal) {
      std::rethrow_exception(refusal);
    }
    throw OutOfMemory("no slot for block '" + wanted.name + "': it needs " + human_bytes(demand.bytes) + ", and " +
                      human_bytes(ledger_.in_use()) + " of " + human_bytes(ledger_.limit()) + " are in use");
  }
}

void SlotSupply::give_back(const Slot& slot) noexcept {
  backend_.slot_returns(slot.ticket.get(), slot.fences);
  slots_.release(slot.memory, slot.bytes);
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
    give_back(slot);
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
      give_back(slot);
      return true;
    }
    if (!wait_for_movable()) {
      return relief_.last_resort && relief_.last_resort();
    }
  }
}

}  // namespace hydra
