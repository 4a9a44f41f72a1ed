// What an update borrows: working memory, and how it is filled and emptied.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/disk_homes.h"

namespace hydra {

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

}  // namespace

void DiskHomes::wait_for(const std::vector<TicketPtr>& tickets) {
  for (const TicketPtr& ticket : tickets) {
    ticket->wait_quietly();
  }
  for (const TicketPtr& ticket : tickets) {
    ticket->wait();
  }
}

// ---- working memory ---------------------------------------------------------------------------

ArenaRegionPtr DiskHomes::take_idle_locked(Bytes bytes) {
  if (idle_.empty()) {
    return nullptr;
  }
  ArenaRegionPtr region = std::move(idle_.back());
  idle_.pop_back();
  if (region->bytes() >= bytes) {
    return region;
  }
  working_bytes_ -= region->bytes();
  --working_sets_;
  return nullptr;
}

ArenaRegionPtr DiskHomes::take_memory(Bytes bytes, bool wait) {
  ArenaRegionPtr region;
  {
    Lock lock(mutex_);
    for (;;) {
      region = take_idle_locked(bytes);
      if (region || working_sets_ < kWorkingSets) {
        break;
      }
      if (!wait) {
        return nullptr;
      }
      const Clock::time_point begin = Clock::now();
      returned_.wait(lock);
      wait_seconds_ += std::chrono::duration<double>(Clock::now() - begin).count();
    }
    if (!region) {
      ++working_sets_;
      working_bytes_ += bytes;
    }
  }
  if (!region) {
    try {
      region = std::make_shared<ArenaRegion>(arena_, bytes);
    } catch (...) {  // re-raised
      const std::lock_guard lock(mutex_);
      --working_sets_;
      working_bytes_ -= bytes;
      throw;
    }
  }
  ArenaRegion* const lent = region.get();
  return {lent, [this, region = std::move(region)](ArenaRegion*) mutable {
            const std::lock_guard lock(mutex_);
            idle_.push_back(std::move(region));
            returned_.notify_all();
          }};
}

// ---- an update --------------------------------------------------------------------------------

void DiskHomes::end_transfers(std::int32_t block) {
  std::vector<TicketPtr> tickets;
  {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) {
      return;
    }
    tickets = std::exchange(found->second.transfers, {});
  }
  const Clock::time_point begin = Clock::now();
  try {
    wait_for(tickets);
  } catch (...) {  // re-raised
    drop_memory(block);
    throw;
  }
  const std::lock_guard lock(mutex_);
  wait_seconds_ += std::chrono::duration<double>(Clock::now() - begin).count();
}

void DiskHomes::drop_memory(std::int32_t block) {
  ArenaRegionPtr memory;  // ends without the lock
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (found != blocks_.end()) {
    memory = std::exchange(found->second.memory, nullptr);
  }
}

void DiskHomes::begin_reading(std::int32_t block, bool wait) {
  std::vector<Resting> resting;
  Bytes bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    if (found == blocks_.end() || found->second.memory) {
      return;
    }
    const auto& before = found->second.transfers;  // writes of the update before
    if (!wait &&
        !std::all_of(before.begin(), before.end(), [](const TicketPtr& ticket) { return ticket->finished(); })) {
      return;
    }
    resting = found->second.resting;
    bytes = found->second.bytes;
  }
  end_transfers(block);
  ArenaRegionPtr memory = take_memory(bytes, wait);
  if (!memory) {
    return;
  }
  std::vector<TicketPtr> tickets;
  for (const Resting& each : resting) {
    std::byte* const to = memory->data() + each.offset;
    if (each.written) {
      tickets.push_back(lane_.submit({DiskDirection::kRead, each.extent, to, memory}));
    } else {
      std::memset(to, 0, static_cast<std::size_t>(file_.bytes(each.extent)));
    }
  }
  const std::lock_guard lock(mutex_);
  Block& contents = blocks_.at(block);
  contents.memory = std::move(memory);
  contents.transfers = std::move(tickets);
}

void DiskHomes::expect(std::int32_t block) {
  try {
    begin_reading(block, /*wait=*/false);
  } catch (const Error&) {  // whoever needs the bytes is told
  }
}

DiskHomes::Places DiskHomes::places(std::int32_t block, const TensorPlan& plan) {
  Places places;
  static_cast<void>(plan.at([&](const at::Tensor& tensor) -> void* {
    const c10::TensorImpl* const key = tensor.unsafeGetTensorImpl();
    {
      const std::lock_guard lock(mutex_);
      if (const Resting* const each = find_locked(block, tensor.unsafeGetTensorImpl()->unsafe_storage())) {
        places.in_memory[key] = each->offset + tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
        return tensor.unsafeGetTensorImpl();  // there will be an address
      }
    }
    return places.on_host[key] = tensor.mutable_data_ptr();
  }));
  return places;
}

StepPlan DiskHomes::borrow(std::int32_t block, const TensorPlan& plan, const Places& places) {
  begin_reading(block, /*wait=*/true);
  end_transfers(block);
  ArenaRegionPtr memory;
  {
    const std::lock_guard lock(mutex_);
    memory = blocks_.at(block).memory;
  }
  return *plan.at([&](const at::Tensor& tensor) -> void* {
    const auto found = places.in_memory.find(tensor.unsafeGetTensorImpl());
    return found != places.in_memory.end() ? memory->data() + found->second
                                           : places.on_host.at(tensor.unsafeGetTensorImpl());
  });
}

void DiskHomes::give_back(std::int32_t block) {
  ArenaRegionPtr memory;
  std::vector<Resting> resting;
  {
    const std::lock_guard lock(mutex_);
    Block& contents = blocks_.at(block);
    memory = std::exchange(contents.memory, nullptr);
    for (Resting& each : contents.resting) {
      each.written = true;
    }
    resting = contents.resting;
  }
  std::vector<TicketPtr> tickets;
  for (const Resting& each : resting) {
    tickets.push_back(lane_.submit({DiskDirection::kWrite, each.extent, memory->data() + each.offset, memory}));
  }
  const std::lock_guard lock(mutex_);
  blocks_.at(block).transfers = std::move(tickets);
}

}  // namespace hydra
