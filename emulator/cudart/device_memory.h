// The memory of one device: pages of its reserved addresses, mapped with the protection key, counted against its
// capacity.
//
// An allocation begins on its own page, at the first free addresses that are large enough; freed pages read as zeros
// when they are mapped again. Reserved addresses get and lose memory in chunks of 2 MiB. Waits for nothing: callers
// release memory that no operation uses. Owns the pages. Thread-safe. Sizes are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace emulated_cuda::cudart {

/// Addresses that are free, handed out first fit. Not thread-safe.
class FreeAddresses {
 public:
  void give(std::uintptr_t begin, std::size_t bytes);
  /// 0 if no free addresses suffice.
  std::uintptr_t take(std::size_t bytes, std::size_t alignment);

 private:
  std::map<std::uintptr_t, std::size_t> ranges_;  // bytes by the first address; never adjacent
};

class DeviceMemory {
 public:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kChunk = std::size_t{2} << 20;

  explicit DeviceMemory(int device) noexcept : device_(device) {}

  void set_capacity(std::size_t bytes);
  std::size_t capacity() const;
  std::size_t used() const;
  bool in_use() const;
  std::size_t allocations() const;

  /// cudaErrorMemoryAllocation if the capacity does not suffice.
  cudaError_t allocate(void** pointer, std::size_t bytes);
  bool is_allocation(const void* pointer) const;
  /// `pointer` is an allocation.
  void release(void* pointer);

  cudaError_t reserve(void** pointer, std::size_t bytes);
  /// cudaErrorInvalidValue unless this is a whole reservation without memory.
  cudaError_t unreserve(void* pointer, std::size_t bytes);
  /// cudaErrorInvalidValue unless these are whole chunks of one reservation, all without memory, or all with it.
  cudaError_t map(void* pointer, std::size_t bytes);
  cudaError_t unmap(void* pointer, std::size_t bytes);

  /// Whether all bytes lie within one allocation, or within mapped chunks of one reservation.
  bool holds(const void* pointer, std::size_t bytes) const;

 private:
  using Reservations = std::map<std::uintptr_t, std::vector<bool>>;  // by the first address: which chunks are mapped
  /// Some chunks of a reservation.
  struct Chunks {
    std::uintptr_t reservation = 0;
    std::size_t first = 0;
    std::size_t end = 0;
  };

  void ensure_addresses();
  bool open_pages(std::uintptr_t begin, std::size_t bytes);
  void close_pages(std::uintptr_t begin, std::size_t bytes);
  /// The chunks that these bytes touch; no reservation if they leave it.
  Chunks chunks_at(std::uintptr_t begin, std::size_t bytes) const;
  /// Whether there are such chunks, and all have memory, or all have none.
  bool all(const Chunks& chunks, bool mapped) const;
  void set(const Chunks& chunks, bool mapped);

  const int device_;
  mutable std::mutex mutex_;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
  bool has_addresses_ = false;
  FreeAddresses free_;
  std::map<std::uintptr_t, std::size_t> allocations_;
  Reservations reservations_;
};

}  // namespace emulated_cuda::cudart
