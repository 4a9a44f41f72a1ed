// Slots from torch's caching allocator, and what the rest of the process takes beside them.
//
// One allocation per slot, on the home stream: the allocator gives memory back only to the stream it came from,
// and only whole allocations. Large slots are rounded up to 2 MiB, the size of the allocator's own pages.
// allocate() must not be called under a lock of the engine: a cache miss runs the free-memory callbacks, and the
// allocator's lock is held meanwhile. While a thread is inside, our own callback does nothing: the pager makes
// room for its slots by itself.
//
// The meter is exact but for other threads at the same moment: whenever slots come or go, and whenever it is
// asked, it takes the allocator's peak since the last time, less the slots there were. So it resets the
// allocator's peak statistics (torch.cuda.max_memory_allocated); reserved_peak() keeps what they would have said.
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

  /// What all but these slots took at most since the last call.
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
