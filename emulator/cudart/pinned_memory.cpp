#include "emulator/cudart/pinned_memory.h"

#include <cstdlib>
#include <iterator>
#include <utility>

#include "emulator/cudart/memory_guard.h"

namespace emulated_cuda::cudart {

namespace {

constexpr std::size_t kAllocationUnit = 4096;

}  // namespace

PinnedMemory::Use::Use(std::shared_ptr<Region> region, int device) : region_(std::move(region)), device_(device) {
  const std::lock_guard lock(region_->mutex_);
  ++region_->uses_[device_];
}

PinnedMemory::Use::~Use() {
  const std::lock_guard lock(region_->mutex_);
  if (--region_->uses_[device_] == 0) {
    region_->uses_.erase(device_);
    region_->changed_.notify_all();
  }
}

std::set<int> PinnedMemory::Region::devices_in_flight() {
  const std::lock_guard lock(mutex_);
  std::set<int> found;
  for (const auto& [user, count] : uses_) {
    found.insert(user);
  }
  return found;
}

void PinnedMemory::Region::wait_until_unused() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return uses_.empty(); });
}

cudaError_t PinnedMemory::register_memory(void* pointer, std::size_t bytes, int device) {
  if (pointer == nullptr || bytes == 0) {
    return cudaErrorInvalidValue;
  }
  const std::lock_guard lock(mutex_);
  if (overlaps(address_of(pointer), bytes)) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  regions_.emplace(address_of(pointer), std::make_shared<Region>(bytes, device, Kind::kRegistered));
  return cudaSuccess;
}

cudaError_t PinnedMemory::allocate(void** pointer, std::size_t bytes, int device) {
  std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(kAllocationUnit, (bytes + kAllocationUnit - 1) / kAllocationUnit * kAllocationUnit),
      &std::free);
  if (!memory) {
    return cudaErrorMemoryAllocation;
  }
  const std::lock_guard lock(mutex_);
  regions_.emplace(address_of(memory.get()), std::make_shared<Region>(bytes, device, Kind::kAllocated));
  *pointer = memory.release();
  return cudaSuccess;
}

std::shared_ptr<PinnedMemory::Region> PinnedMemory::remove(const void* pointer, Kind kind) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(address_of(pointer));
  if (found == regions_.end() || found->second->kind != kind) {
    return nullptr;
  }
  std::shared_ptr<Region> region = std::move(found->second);
  regions_.erase(found);
  return region;
}

void PinnedMemory::free(void* pointer) { std::free(pointer); }

std::shared_ptr<PinnedMemory::Region> PinnedMemory::find(const void* pointer, std::size_t bytes) const {
  const std::uintptr_t begin = address_of(pointer);
  const std::lock_guard lock(mutex_);
  const auto next = regions_.upper_bound(begin);
  if (next == regions_.begin()) {
    return nullptr;
  }
  const auto& [first, region] = *std::prev(next);
  const std::size_t offset = begin - first;
  return offset < region->bytes && bytes <= region->bytes - offset ? region : nullptr;
}

std::shared_ptr<PinnedMemory::Use> PinnedMemory::use(const void* pointer, std::size_t bytes, int device) const {
  std::shared_ptr<Region> region = find(pointer, bytes);
  return region ? std::make_shared<Use>(std::move(region), device) : nullptr;
}

bool PinnedMemory::overlaps(std::uintptr_t begin, std::size_t bytes) const {
  const auto next = regions_.lower_bound(begin);
  if (next != regions_.end() && next->first - begin < bytes) {
    return true;
  }
  return next != regions_.begin() && begin - std::prev(next)->first < std::prev(next)->second->bytes;
}

}  // namespace emulated_cuda::cudart
