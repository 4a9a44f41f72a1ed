#include "emulator/cudart/device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "emulator/cudart/memory_guard.h"

namespace emulated_cuda::cudart {

namespace {

void* pointer_to(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

/// The entry that begins at or before the address.
template <class Map>
auto entry_at(Map& map, std::uintptr_t address) {
  const auto next = map.upper_bound(address);
  return next == map.begin() ? map.end() : std::prev(next);
}

}  // namespace

void FreeAddresses::give(std::uintptr_t begin, std::size_t bytes) {
  const auto next = ranges_.lower_bound(begin);
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      bytes += before->second;
      ranges_.erase(before);
    }
  }
  if (next != ranges_.end() && begin + bytes == next->first) {
    bytes += next->second;
    ranges_.erase(next);
  }
  ranges_.emplace(begin, bytes);
}

std::uintptr_t FreeAddresses::take(std::size_t bytes, std::size_t alignment) {
  for (const auto& [begin, size] : ranges_) {
    const std::uintptr_t taken = rounded_up(begin, alignment);
    const std::size_t skipped = taken - begin;
    if (size < skipped || size - skipped < bytes) {
      continue;
    }
    const std::size_t left = size - skipped - bytes;
    const std::uintptr_t whole = begin;
    ranges_.erase(whole);
    if (skipped > 0) {
      ranges_.emplace(whole, skipped);
    }
    if (left > 0) {
      ranges_.emplace(taken + bytes, left);
    }
    return taken;
  }
  return 0;
}

void DeviceMemory::set_capacity(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  capacity_ = bytes;
}

std::size_t DeviceMemory::capacity() const {
  const std::lock_guard lock(mutex_);
  return capacity_;
}

std::size_t DeviceMemory::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

bool DeviceMemory::in_use() const {
  const std::lock_guard lock(mutex_);
  return !allocations_.empty() || !reservations_.empty();
}

std::size_t DeviceMemory::allocations() const {
  const std::lock_guard lock(mutex_);
  return allocations_.size();
}

cudaError_t DeviceMemory::allocate(void** pointer, std::size_t bytes) {
  const std::size_t size = rounded_up(bytes, kPage);
  const std::lock_guard lock(mutex_);
  if (size < bytes || size > capacity_ || used_ > capacity_ - size) {
    return cudaErrorMemoryAllocation;
  }
  ensure_addresses();
  const std::uintptr_t begin = free_.take(size, kPage);
  if (begin == 0) {
    return cudaErrorMemoryAllocation;
  }
  if (!open_pages(begin, size)) {
    free_.give(begin, size);
    return cudaErrorMemoryAllocation;
  }
  allocations_.emplace(begin, size);
  *pointer = pointer_to(begin);
  return cudaSuccess;
}

bool DeviceMemory::is_allocation(const void* pointer) const {
  const std::lock_guard lock(mutex_);
  return allocations_.contains(address_of(pointer));
}

void DeviceMemory::release(void* pointer) {
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(address_of(pointer));
  if (found == allocations_.end()) {
    return;
  }
  const auto [begin, bytes] = *found;
  allocations_.erase(found);
  close_pages(begin, bytes);
  free_.give(begin, bytes);
}

cudaError_t DeviceMemory::reserve(void** pointer, std::size_t bytes) {
  if (bytes == 0 || bytes % kChunk != 0) {
    return cudaErrorInvalidValue;
  }
  const std::lock_guard lock(mutex_);
  ensure_addresses();
  const std::uintptr_t begin = free_.take(bytes, kChunk);
  if (begin == 0) {
    return cudaErrorMemoryAllocation;
  }
  reservations_.emplace(begin, std::vector<bool>(bytes / kChunk));
  *pointer = pointer_to(begin);
  return cudaSuccess;
}

cudaError_t DeviceMemory::unreserve(void* pointer, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(address_of(pointer));
  if (found == reservations_.end() || found->second.size() * kChunk != bytes ||
      std::ranges::find(found->second, true) != found->second.end()) {
    return cudaErrorInvalidValue;
  }
  reservations_.erase(found);
  free_.give(address_of(pointer), bytes);
  return cudaSuccess;
}

cudaError_t DeviceMemory::map(void* pointer, std::size_t bytes) {
  const std::uintptr_t begin = address_of(pointer);
  const std::lock_guard lock(mutex_);
  const Chunks chunks = chunks_at(begin, bytes);
  if (begin % kChunk != 0 || bytes % kChunk != 0 || !all(chunks, false)) {
    return cudaErrorInvalidValue;
  }
  if (bytes > capacity_ || used_ > capacity_ - bytes || !open_pages(begin, bytes)) {
    return cudaErrorMemoryAllocation;
  }
  set(chunks, true);
  return cudaSuccess;
}

cudaError_t DeviceMemory::unmap(void* pointer, std::size_t bytes) {
  const std::uintptr_t begin = address_of(pointer);
  const std::lock_guard lock(mutex_);
  const Chunks chunks = chunks_at(begin, bytes);
  if (begin % kChunk != 0 || bytes % kChunk != 0 || !all(chunks, true)) {
    return cudaErrorInvalidValue;
  }
  close_pages(begin, bytes);
  set(chunks, false);
  return cudaSuccess;
}

bool DeviceMemory::holds(const void* pointer, std::size_t bytes) const {
  const std::uintptr_t begin = address_of(pointer);
  const std::lock_guard lock(mutex_);
  const auto found = entry_at(allocations_, begin);
  if (found != allocations_.end() && begin - found->first < found->second) {
    return bytes <= found->second - (begin - found->first);
  }
  return all(chunks_at(begin, bytes), true);
}

void DeviceMemory::ensure_addresses() {
  if (!has_addresses_) {
    free_.give(reserve_device(device_), kDeviceAddresses);
    has_addresses_ = true;
  }
}

bool DeviceMemory::open_pages(std::uintptr_t begin, std::size_t bytes) {
  void* const place = pointer_to(begin);
  const int key = protection_key();
  const int access = PROT_READ | PROT_WRITE;
  const int status = key < 0 ? ::mprotect(place, bytes, access) : ::pkey_mprotect(place, bytes, access, key);
  used_ += status == 0 ? bytes : 0;
  return status == 0;
}

void DeviceMemory::close_pages(std::uintptr_t begin, std::size_t bytes) {
  ::mprotect(pointer_to(begin), bytes, PROT_NONE);
  ::madvise(pointer_to(begin), bytes, MADV_DONTNEED);
  name_bytes(begin, bytes, {});
  used_ -= bytes;
}

DeviceMemory::Chunks DeviceMemory::chunks_at(std::uintptr_t begin, std::size_t bytes) const {
  const auto found = entry_at(reservations_, begin);
  if (found == reservations_.end() || bytes == 0) {
    return {};
  }
  const std::size_t offset = begin - found->first;
  const std::size_t size = found->second.size() * kChunk;
  if (offset >= size || bytes > size - offset) {
    return {};
  }
  return {.reservation = found->first, .first = offset / kChunk, .end = (offset + bytes - 1) / kChunk + 1};
}

bool DeviceMemory::all(const Chunks& chunks, bool mapped) const {
  if (chunks.reservation == 0) {
    return false;
  }
  const std::vector<bool>& known = reservations_.at(chunks.reservation);
  for (std::size_t chunk = chunks.first; chunk < chunks.end; ++chunk) {
    if (known[chunk] != mapped) {
      return false;
    }
  }
  return true;
}

void DeviceMemory::set(const Chunks& chunks, bool mapped) {
  std::vector<bool>& known = reservations_.at(chunks.reservation);
  for (std::size_t chunk = chunks.first; chunk < chunks.end; ++chunk) {
    known[chunk] = mapped;
  }
}

}  // namespace emulated_cuda::cudart
