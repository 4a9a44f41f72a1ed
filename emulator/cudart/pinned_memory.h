// Host memory that is page-locked: registered by cudaHostRegister, or allocated by cudaHostAlloc.
//
// An operation that reads or writes such memory late holds a `Use` until it has ended. Removal tells on which devices
// operations were still in flight; the caller makes those devices fail, and then waits until no operation uses the
// memory. Owns what it allocated. Thread-safe. Sizes are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace emulated_cuda::cudart {

class PinnedMemory {
 public:
  enum class Kind { kRegistered, kAllocated };

  class Region;
  /// Keeps a region in flight on a device.
  class Use {
   public:
    Use(std::shared_ptr<Region> region, int device);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const std::shared_ptr<Region> region_;
    const int device_;
  };
  class Region {
   public:
    Region(std::size_t size, int on_device, Kind of_kind) : bytes(size), device(on_device), kind(of_kind) {}

    std::set<int> devices_in_flight();
    void wait_until_unused();

    const std::size_t bytes;
    const int device;  // the current one of the thread that pinned it
    const Kind kind;

   private:
    friend class Use;

    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<int, int> uses_;  // by device
  };

  /// cudaErrorHostMemoryAlreadyRegistered if bytes of it are pinned.
  cudaError_t register_memory(void* pointer, std::size_t bytes, int device);
  cudaError_t allocate(void** pointer, std::size_t bytes, int device);
  /// The region that begins here is pinned no more. Null if there is none of this kind.
  std::shared_ptr<Region> remove(const void* pointer, Kind kind);
  /// Frees what `allocate` gave, after `remove`.
  static void free(void* pointer);

  /// The region in which all of these bytes lie, or null.
  std::shared_ptr<Region> find(const void* pointer, std::size_t bytes) const;
  /// Null unless all of these bytes lie in one region.
  std::shared_ptr<Use> use(const void* pointer, std::size_t bytes, int device) const;

 private:
  bool overlaps(std::uintptr_t begin, std::size_t bytes) const;

  mutable std::mutex mutex_;
  std::map<std::uintptr_t, std::shared_ptr<Region>> regions_;  // by the first address
};

}  // namespace emulated_cuda::cudart
