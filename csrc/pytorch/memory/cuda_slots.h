// Slots from torch's caching allocator, and a meter of the memory that the process allocates beside them.
//
// Each slot is one allocation on the main stream: the allocator reuses memory only on the stream it came from, and only
// whole allocations. Large slots are rounded up to 2 MiB, the size of the allocator's own pages.
// allocate() must not be called under a lock of the engine: a cache miss runs the free-memory callbacks while the
// allocator's lock is held. While a thread is in allocate(), our own callback does nothing, since the pager makes
// room for its slots itself.
//
// At each allocation and release of a slot, and at each call, the meter takes the allocator's peak since the last time,
// minus the slots of that time. It is exact unless other threads allocate at the same moment. It resets the
// allocator's peak statistics (torch.cuda.max_memory_allocated); reserved_peak() keeps the peak of reserved memory.
// Thread-safe. Sizes are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "csrc/memory/resource.h"

namespace hydra {

class CudaSlots final : public Resource {
 public:
  CudaSlots(int device, cudaStream_t home) noexcept : device_(device), home_(home) {}

  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;

  /// Returns the peak of allocations other than these slots since the last call.
  Bytes take_activation_peak();
  Bytes reserved_peak() const noexcept { return reserved_peak_.load(std::memory_order_relaxed); }
  Bytes live_bytes() const noexcept { return live_.load(std::memory_order_relaxed); }

 private:
  Bytes observe() noexcept;

  const int device_;
  const cudaStream_t home_;
  std::atomic<Bytes> live_{0};
  std::atomic<Bytes> activation_peak_{0};
  std::atomic<Bytes> reserved_peak_{0};
};

}  // namespace hydra
