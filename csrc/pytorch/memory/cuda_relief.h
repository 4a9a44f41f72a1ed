// The safety net on CUDA: evicts blocks before torch's allocator asks the driver for memory.
//
// torch calls registered callbacks on every cache miss: without a size, with the device's allocator lock held, on any
// thread, with or without the interpreter lock. So the callback waits for no other thread, which may need the allocator
// to continue, and for no lane, device or interpreter lock. Far below the budget a call costs one look at the
// allocator's counters. The size of the missed allocation is unknown, so blocks are evicted until a headroom is free.
// From the second step on the plan has left that room free.
//
// torch cannot unregister a callback. The first run registers ours, and it does nothing while there is no run.
#pragma once

#include <cstdint>
#include <list>

#include "csrc/transfer/device_backend.h"

namespace hydra {

/// The part of the budget that is kept free for a missed allocation: one eighth.
inline constexpr Bytes kReliefHeadroomDivisor = 8;

/// Keeps the calling thread's allocations from asking for relief, for a scope.
class CudaReliefPause {
 public:
  CudaReliefPause() noexcept;
  ~CudaReliefPause();
  CudaReliefPause(const CudaReliefPause&) = delete;
  CudaReliefPause& operator=(const CudaReliefPause&) = delete;
};

/// Relieves `device` through `client` for its lifetime.
class CudaReliefClient {
 public:
  CudaReliefClient(int device, MemoryClient client);
  ~CudaReliefClient();
  CudaReliefClient(const CudaReliefClient&) = delete;
  CudaReliefClient& operator=(const CudaReliefClient&) = delete;

  int device() const noexcept { return device_; }
  const MemoryClient& client() const noexcept { return client_; }

 private:
  const int device_;
  const MemoryClient client_;
};

}  // namespace hydra
