#include "csrc/pytorch/disk_homes.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

Bytes bytes_of(const at::Tensor& tensor) { return static_cast<Bytes>(tensor.nbytes()); }

Bytes on_disk(Bytes bytes) noexcept { return round_up(bytes, kDiskAlignment); }

bool is_among(const WithheldTensor& one, const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return shows(tensor, one.storage); });
}

}  // namespace

DiskHomes::DiskHomes(const std::string& folder, std::shared_ptr<FileOperations> files)
    : arena_(std::make_shared<HostArena>()),
      files_(std::move(files)),
      file_(folder, files_ ? *files_ : system_files()),
      lane_(file_) {}

DiskHomes::~DiskHomes() { abandon(); }

// ---- what is where ----------------------------------------------------------------------------

DiskHomes::Resting* DiskHomes::find_locked(std::int32_t block, const c10::Storage& storage) {
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) {
    return nullptr;
  }
  auto& resting = found->second.resting;
  const auto one = std::find_if(resting.begin(), resting.end(), [&](const Resting& each) {
    return each.tensor.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  return one == resting.end() ? nullptr : &*one;
}

bool DiskHomes::holds(const at::Tensor& tensor) const {
  const WithheldPtr withheld = withheld_of(tensor);
  const std::lock_guard lock(mutex_);
  const auto found = withheld ? blocks_.find(withheld->block) : blocks_.end();
  return found != blocks_.end() && std::any_of(found->second.resting.begin(), found->second.resting.end(),
                                               [&](const Resting& each) { return shows(tensor, each.tensor.storage); });
}

std::vector<std::int32_t> DiskHomes::blocks() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::int32_t> held;
  for (const auto& [block, contents] : blocks_) {
    held.push_back(block);
  }
  return held;
}

DiskStatistics DiskHomes::statistics() const {
  DiskStatistics statistics;
  statistics.read_bytes = lane_.statistics(DiskDirection::kRead).bytes;
  statistics.written_bytes = lane_.statistics(DiskDirection::kWrite).bytes;
  const std::lock_guard lock(mutex_);
  for (const auto& [block, contents] : blocks_) {
    statistics.at_home_bytes += contents.bytes;
  }
  statistics.working_bytes = working_bytes_;
  statistics.wait_seconds = wait_seconds_;
  return statistics;
}

std::int32_t DiskHomes::take_extent(Bytes bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = free_extents_.find(on_disk(bytes));
    if (found != free_extents_.end()) {
      const std::int32_t extent = found->second;
      free_extents_.erase(found);
      return extent;
    }
  }
  return file_.reserve(bytes);
}

void DiskHomes::reserve(const std::vector<Bytes>& sizes) {
  for (const Bytes bytes : sizes) {
    free_extent(file_.reserve(bytes));
  }
}

void DiskHomes::free_extent(std::int32_t extent) {
  const Bytes bytes = file_.bytes(extent);
  const std::lock_guard lock(mutex_);
  free_extents_.emplace(bytes, extent);
}

void DiskHomes::add(std::int32_t block, WithheldTensor tensor, std::int32_t extent, bool written) {
  note_on_disk(tensor);
  const std::lock_guard lock(mutex_);
  Block& contents = blocks_[block];
  contents.resting.push_back(
      {.tensor = std::move(tensor), .extent = extent, .offset = contents.bytes, .written = written});
  contents.bytes += file_.bytes(extent);
}

// ---- to the disk ------------------------------------------------------------------------------

at::Tensor DiskHomes::make_zeros(std::int32_t block, const at::Tensor& like, at::ScalarType dtype,
                                 const std::weak_ptr<PagedModel>& owner) {
  const at::Tensor shape = at::empty_like(like, at::TensorOptions().dtype(dtype).device(at::kMeta));
  if (bytes_of(shape) < kLeastBytes) {
    return at::zeros_like(like, at::TensorOptions().dtype(dtype));
  }
  const std::int32_t extent = take_extent(bytes_of(shape));
  at::Tensor tensor = make_withheld(shape, owner, block, nullptr);
  add(block, {tensor, tensor.storage()}, extent, /*written=*/false);
  return tensor;
}

void DiskHomes::settle(std::int32_t block, const std::vector<at::Tensor>& tensors,
                       const std::weak_ptr<PagedModel>& owner) {
  const std::lock_guard alone(moving_);
  if (holds_others(block, tensors)) {  // no optimizer's any more, but perhaps still somebody's
    bring_home_alone(block);
  }
  std::vector<at::Tensor> movers;
  std::vector<std::int32_t> extents;
  Bytes bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (bytes_of(tensor) >= kLeastBytes && is_whole(tensor)) {
      if (!is_alone(tensor)) {  // what was loaded, and has been seen by Python's storages, never is
        tensor.set_data(tensor.clone());
      }
      movers.push_back(tensor);
      bytes += on_disk(bytes_of(tensor));
    }
  }
  if (movers.empty()) {
    return;
  }
  try {
    for (const at::Tensor& tensor : movers) {
      extents.push_back(take_extent(bytes_of(tensor)));
    }
    const std::shared_ptr<ArenaRegion> memory = take_memory(bytes);
    std::vector<TicketPtr> tickets;
    Bytes offset = 0;
    for (std::size_t i = 0; i < movers.size(); ++i) {
      std::byte* const to = memory->data() + offset;
      std::memcpy(to, movers[i].const_data_ptr(), movers[i].nbytes());
      tickets.push_back(lane_.submit({DiskDirection::kWrite, extents[i], to, memory}));
      offset += on_disk(bytes_of(movers[i]));
    }
    wait_for(tickets);
  } catch (...) {  // re-raised: the tensors are where they were
    std::for_each(extents.begin(), extents.end(), [this](std::int32_t extent) { free_extent(extent); });
    throw;
  }
  for (std::size_t i = 0; i < movers.size(); ++i) {
    add(block, withhold(movers[i], owner, block), extents[i], /*written=*/true);
  }
}

bool DiskHomes::holds_others(std::int32_t block, const std::vector<at::Tensor>& tensors) const {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  return found != blocks_.end() && !std::all_of(found->second.resting.begin(), found->second.resting.end(),
                                                [&](const Resting& each) { return is_among(each.tensor, tensors); });
}

// ---- to the host ------------------------------------------------------------------------------

void DiskHomes::bring_home(std::int32_t block) {
  const std::lock_guard alone(moving_);
  bring_home_alone(block);
}

void DiskHomes::bring_home_alone(std::int32_t block) {
  std::vector<Resting> resting;
  {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) {
      return;
    }
    resting = found->second.resting;
  }
  end_transfers(block);
  std::vector<ArenaRegionPtr> regions;
  std::vector<TicketPtr> tickets;
  for (const Resting& each : resting) {
    const Bytes bytes = file_.bytes(each.extent);
    regions.push_back(std::make_shared<ArenaRegion>(arena_, bytes));
    if (each.written) {
      tickets.push_back(lane_.submit({DiskDirection::kRead, each.extent, regions.back()->data(), regions.back()}));
    } else {
      std::memset(regions.back()->data(), 0, static_cast<std::size_t>(bytes));
    }
  }
  wait_for(tickets);
  for (std::size_t i = 0; i < resting.size(); ++i) {
    withheld_of(resting[i].tensor.storage)->memory = data_pointer_into(regions[i], 0);
    hydra::give_back(resting[i].tensor);
    free_extent(resting[i].extent);
  }
  decltype(blocks_)::node_type gone;  // ends without the lock, which its memory takes to come back
  const std::lock_guard lock(mutex_);
  gone = blocks_.extract(block);
}

void DiskHomes::bring_home() {
  for (const std::int32_t block : blocks()) {
    bring_home(block);
  }
}

void DiskHomes::abandon() noexcept {
  lane_.drain();
  std::map<std::int32_t, Block> gone;
  {
    const std::lock_guard lock(mutex_);
    gone = std::exchange(blocks_, {});
  }
  for (const auto& [block, contents] : gone) {
    for (const Resting& each : contents.resting) {
      give_up(each.tensor);
    }
  }
}

}  // namespace hydra
