// Working memory of updates, and weights for fills: how they are read from the disk and written back.
#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/base/clock.h"
#include "csrc/base/errors.h"
#include "csrc/pytorch/homes/disk_homes.h"

namespace hydra {

TicketPtr DiskHomes::read_weights(std::int32_t block, const ArenaRegionPtr& memory) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) {
    return nullptr;
  }
  for (const Resting& resting : found->second.resting) {
    if (resting.role == DiskRole::kWeights) {
      return lane_.submit({DiskDirection::kRead, resting.extent, memory->data(), memory});
    }
  }
  return nullptr;
}

std::shared_ptr<const std::byte> DiskHomes::updated_weights(std::int32_t block) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  ArenaRegionPtr memory = found != blocks_.end() ? found->second.being_written.lock() : nullptr;
  if (!memory) {
    return nullptr;
  }
  const auto& resting = found->second.resting;
  const auto weights = std::find_if(resting.begin(), resting.end(), [](const Resting& each) {
    return each.role == DiskRole::kWeights && each.offset >= 0;
  });
  if (weights == resting.end()) {
    return nullptr;
  }
  spared_bytes_ += file_.bytes(weights->extent);
  const std::byte* const bytes = memory->data() + weights->offset;
  return {std::move(memory), bytes};
}

void DiskHomes::end_reading(std::int32_t block) {
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
  } catch (...) {
    drop_memory(block);
    throw;
  }
  const std::lock_guard lock(mutex_);
  wait_seconds_ += seconds_since(begin);
}

void DiskHomes::drop_memory(std::int32_t block) {
  ArenaRegionPtr memory;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (found != blocks_.end()) {
    memory = std::exchange(found->second.memory, nullptr);
  }
}

std::vector<DiskHomes::Resting> DiskHomes::worked_on_locked(const Block& contents) {
  std::vector<Resting> resting;
  std::copy_if(contents.resting.begin(), contents.resting.end(), std::back_inserter(resting),
               [](const Resting& each) { return each.offset >= 0; });
  return resting;
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
    resting = worked_on_locked(found->second);
    bytes = found->second.bytes;
  }
  ArenaRegionPtr memory = working_->take(bytes, wait);
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
  } catch (const Error&) {  // the next caller that needs the bytes gets the error
  }
}

DiskHomes::Places DiskHomes::places(std::int32_t block, const TensorPlan& plan) {
  Places places;
  const std::lock_guard lock(mutex_);
  Block& contents = blocks_.at(block);
  contents.bytes = 0;
  contents.being_written.reset();
  for (Resting& resting : contents.resting) {
    resting.offset = -1;
  }
  static_cast<void>(plan.at([&](const at::Tensor& tensor) -> void* {
    const c10::TensorImpl* const key = tensor.unsafeGetTensorImpl();
    if (const std::optional<Found> found = find_locked(block, key->unsafe_storage())) {
      Resting& each = contents.resting[found->resting];
      if (each.offset < 0) {
        each.offset = contents.bytes;
        contents.bytes += file_.bytes(each.extent);
      }
      places.in_memory[key] =
          each.offset + found->offset + tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
      return tensor.unsafeGetTensorImpl();  // not null: the tensor has an address once its bytes are borrowed
    }
    return places.on_host[key] = tensor.mutable_data_ptr();
  }));
  return places;
}

StepPlan DiskHomes::borrow(std::int32_t block, const TensorPlan& plan, const Places& places) {
  begin_reading(block, /*wait=*/true);
  end_reading(block);
  ArenaRegionPtr memory;
  std::vector<Resting> resting;
  {
    const std::lock_guard lock(mutex_);
    memory = blocks_.at(block).memory;
    resting = worked_on_locked(blocks_.at(block));
  }
  const auto address = [&](const at::Tensor& tensor) -> void* {
    const auto found = places.in_memory.find(tensor.unsafeGetTensorImpl());
    return found != places.in_memory.end() ? memory->data() + found->second
                                           : places.on_host.at(tensor.unsafeGetTensorImpl());
  };
  for (const Resting& each : resting) {
    if (!each.written && each.copy_of.defined()) {
      begin_as(each, memory->data() + each.offset, address(each.copy_of));
    }
  }
  return *plan.at(address);
}

void DiskHomes::give_back(std::int32_t block) {
  ArenaRegionPtr memory;
  std::vector<Resting> resting;
  std::vector<at::Tensor> copied;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    Block& contents = blocks_.at(block);
    memory = std::exchange(contents.memory, nullptr);
    contents.being_written = memory;
    for (Resting& each : contents.resting) {
      if (each.offset >= 0) {
        each.written = true;
        copied.push_back(std::exchange(each.copy_of, {}));
      }
    }
    resting = worked_on_locked(contents);
    peek_ = {};
  }
  for (const Resting& each : resting) {
    if (each.role != DiskRole::kGradient) {
      lane_.submit({DiskDirection::kWrite, each.extent, memory->data() + each.offset, memory});
    }
  }
}

}  // namespace hydra
