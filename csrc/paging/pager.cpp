#include "csrc/paging/pager.h"

#include <exception>
#include <utility>

namespace hydra {

Pager::Pager(DeviceBackend& backend, Resource& slots, Ledger& ledger, PagerOptions options)
    : backend_(backend),
      contents_(backend, table_),
      supply_(backend, slots, ledger, table_, contents_, std::move(options.relief)),
      fills_(backend, table_, supply_, options.fault_path),
      passes_(backend, ledger, table_, fills_, std::move(options.activations)) {}

Pager::~Pager() { close(); }

std::int32_t Pager::add_block(std::string name, Bytes bytes, std::unique_ptr<BlockClient> client) {
  return table_.add(std::move(name), bytes, std::move(client));
}

void Pager::acquire(std::int32_t index, AcquireReason reason) {
  table_.home().expect_here();
  PagedBlock& block = table_.at(index);
  backend_.expect_usable();
  {
    const BlockTable::Lock lock = table_.lock();
    ++block.pins;
    if (block.place.is_ready()) {
      block.place.uses().note_use();
      return;
    }
  }
  try {
    fills_.make_present(block, reason);
  } catch (...) {  // re-raised: a failed acquire pins nothing
    const BlockTable::Lock lock = table_.lock();
    block.unpin();
    throw;
  }
}

void Pager::release(std::int32_t index, AcquireReason reason) noexcept {
  if (!table_.home().here()) {
    return;
  }
  PagedBlock& block = *table_.all()[static_cast<std::size_t>(index)];
  // Recorded under the lock: otherwise another thread's use in between would seem to be covered by this fence.
  const BlockTable::Lock lock = table_.lock();
  block.end_use(backend_, reason);
}

void Pager::close() noexcept {
  if (!table_.home().here()) {
    return;
  }
  {
    const BlockTable::Lock lock = table_.lock();
    table_.close(lock);  // from now on no fill begins
  }
  backend_.to_device().drain();
  backend_.to_host().drain();
  for (const auto& block : table_.all()) {
    Slot slot;
    {
      const BlockTable::Lock lock = table_.lock();
      block->pins = 0;
      block->truth.discard();
      if (block->place.memory() == nullptr) {
        continue;
      }
      try {
        block->place.uses().cover(backend_);
      } catch (const std::exception&) {
        // No host memory for a fence: compute on the device's main stream precedes the slot's next use anyway.
      }
      slot = block->place.give_up_slot();
      slot.ticket = nullptr;  // the lanes have ended it
      table_.note_change(lock);
    }
    supply_.give_back(slot);
  }
}

// ---- figures --------------------------------------------------------------------------------------------------------

BlockState Pager::state(std::int32_t block) const {
  const BlockTable::Lock lock = table_.lock();
  return table_.at(block).place.state();
}

std::int64_t Pager::pins() const {
  const BlockTable::Lock lock = table_.lock();
  std::int64_t sum = 0;
  for (const auto& block : table_.all()) {
    sum += block->pins;
  }
  return sum;
}

Bytes Pager::resident_bytes() const {
  const BlockTable::Lock lock = table_.lock();
  Bytes sum = 0;
  for (const auto& block : table_.all()) {
    sum += block->place.memory() != nullptr ? block->place.bytes() : 0;
  }
  return sum;
}

PagerStatistics Pager::statistics() const {
  const BlockTable::Lock lock = table_.lock();
  return table_.statistics(lock);
}

std::string Pager::describe_residents() const {
  const BlockTable::Lock lock = table_.lock();
  std::string text;
  for (const auto& block : table_.all()) {
    if (block->place.memory() != nullptr) {
      text += (text.empty() ? "" : ", ") + ("'" + block->name + "' " + human_bytes(block->place.bytes())) +
              (block->truth.is_settled() ? " at home"
               : block->pins > 0         ? " in use"
                                         : "");
    }
  }
  return text.empty() ? "no block" : text;
}

}  // namespace hydra
