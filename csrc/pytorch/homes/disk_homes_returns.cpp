// Returns extents from the disk to the host, and reads tensors whose home stays the disk.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/homes/disk_homes.h"
#include "csrc/pytorch/memory/counting_allocator.h"

namespace hydra {

namespace {

at::Tensor tensor_in(void* memory, const at::Tensor& like, at::ScalarType dtype) {
  return at::from_blob(memory, like.sizes(), like.strides(), at::TensorOptions().dtype(dtype));
}

}  // namespace

void DiskHomes::wait_for(const std::vector<TicketPtr>& tickets) {
  for (const TicketPtr& ticket : tickets) {
    ticket->wait_quietly();
  }
  for (const TicketPtr& ticket : tickets) {
    ticket->wait();
  }
}

TicketPtr DiskHomes::read_extent(std::int32_t block, const Resting& resting, const ArenaRegionPtr& memory) {
  if (resting.written) {
    return lane_.submit({DiskDirection::kRead, resting.extent, memory->data(), memory});
  }
  std::memset(memory->data(), 0, static_cast<std::size_t>(file_.bytes(resting.extent)));
  if (resting.copy_of.defined()) {
    const at::Tensor here = read_alone(block, resting.copy_of);
    begin_as(resting, memory->data(), (here.defined() ? here : resting.copy_of).const_data_ptr());
  }
  return nullptr;
}

void DiskHomes::begin_as(const Resting& resting, void* to, const void* from) {
  const at::NoGradGuard no_grad;
  const HostScope on_the_host;
  const at::Tensor& tensor = resting.members.front().tensor.tensor;
  tensor_in(to, tensor, tensor.scalar_type())
      .copy_(tensor_in(const_cast<void*>(from), tensor, resting.copy_of.scalar_type()));
}

void DiskHomes::give_home(const Resting& resting, const ArenaRegionPtr& region) {
  for (const Member& member : resting.members) {
    withheld_of(member.tensor.storage)->memory = data_pointer_into(region, member.offset);
    WithheldTensor tensor = member.tensor;
    if (auto gradient = member.gradient.lock()) {
      tensor.tensor = at::Tensor(std::move(gradient));
    }
    hydra::give_back(tensor);
  }
  if (resting.backing != nullptr) {
    resting.backing->came_home(region);
  }
}

void DiskHomes::bring_home_alone(std::int32_t block, const std::function<bool(const Resting&)>& chosen) {
  std::vector<Resting> coming;
  {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) {
      return;
    }
    std::copy_if(found->second.resting.begin(), found->second.resting.end(), std::back_inserter(coming), chosen);
  }
  if (coming.empty()) {
    return;
  }
  end_reading(block);
  drop_memory(block);
  std::vector<ArenaRegionPtr> regions;
  std::vector<TicketPtr> tickets;
  for (const Resting& each : coming) {
    const auto& arena = each.role == DiskRole::kState ? plain_ : arena_;
    regions.push_back(std::make_shared<ArenaRegion>(arena, file_.bytes(each.extent)));
    if (TicketPtr ticket = read_extent(block, each, regions.back())) {
      tickets.push_back(std::move(ticket));
    }
  }
  wait_for(tickets);
  std::vector<Resting> gone;  // destroyed without the lock
  for (std::size_t i = 0; i < coming.size(); ++i) {
    give_home(coming[i], regions[i]);
    free_extent(coming[i].extent);
  }
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  auto& resting = found->second.resting;
  const auto came = std::stable_partition(resting.begin(), resting.end(), [&](const Resting& each) {
    return std::none_of(coming.begin(), coming.end(), [&](const Resting& one) { return one.extent == each.extent; });
  });
  std::move(came, resting.end(), std::back_inserter(gone));
  resting.erase(came, resting.end());
  if (resting.empty()) {
    blocks_.erase(found);
  }
}

void DiskHomes::bring_home(std::int32_t block, const c10::Storage& storage) {
  const std::lock_guard alone(moving_);
  bring_home_alone(block, [&](const Resting& resting) {
    return std::any_of(resting.members.begin(), resting.members.end(), [&](const Member& member) {
      return member.tensor.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    });
  });
}

void DiskHomes::bring_weights_home(std::int32_t block) {
  const std::lock_guard alone(moving_);
  bring_home_alone(block, [](const Resting& resting) { return resting.role == DiskRole::kWeights; });
}

void DiskHomes::bring_home(std::int32_t block) {
  const std::lock_guard alone(moving_);
  drop_unused(block);
  bring_home_alone(block, [](const Resting&) { return true; });
}

void DiskHomes::bring_home() {
  std::vector<std::int32_t> held;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [block, contents] : blocks_) {
      held.push_back(block);
    }
  }
  for (const std::int32_t block : held) {
    bring_home(block);
  }
}

at::Tensor DiskHomes::read(std::int32_t block, const at::Tensor& tensor) {
  const std::lock_guard alone(moving_);
  return read_alone(block, tensor);
}

at::Tensor DiskHomes::read_alone(std::int32_t block, const at::Tensor& tensor) {
  Resting resting;
  Bytes offset = 0;
  ArenaRegionPtr region;
  {
    const std::lock_guard lock(mutex_);
    const std::optional<Found> found = find_locked(block, tensor.unsafeGetTensorImpl()->unsafe_storage());
    if (!found) {
      return {};
    }
    resting = blocks_.at(block).resting[found->resting];
    offset = found->offset + tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
    region = peek_.extent == resting.extent ? peek_.region : nullptr;
  }
  if (!region) {
    region = std::make_shared<ArenaRegion>(plain_, file_.bytes(resting.extent));
    if (const TicketPtr ticket = read_extent(block, resting, region)) {
      ticket->wait();
    }
  }
  const at::NoGradGuard no_grad;
  const HostScope on_the_host;
  at::Tensor copy =
      at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
  copy.copy_(tensor_in(region->data() + offset, tensor, tensor.scalar_type()));
  if (resting.role == DiskRole::kWeights) {
    const std::lock_guard lock(mutex_);
    std::swap(peek_.region, region);
    peek_.extent = resting.extent;
  }
  return copy;
}

void DiskHomes::abandon() noexcept {
  lane_.drain();
  std::map<std::int32_t, Block> gone;
  {
    const std::lock_guard lock(mutex_);
    gone = std::exchange(blocks_, {});
    peek_ = {};
  }
  for (const auto& [block, contents] : gone) {
    for (const Resting& resting : contents.resting) {
      for (const Member& member : resting.members) {
        give_up(member.tensor);
      }
    }
  }
}

}  // namespace hydra
