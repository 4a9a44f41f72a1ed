// The safety net on CUDA: before torch's allocator asks the driver for memory, blocks may go.
//
// torch calls registered callbacks on every cache miss, without a size, with the device's allocator lock held, on
// any thread, the interpreter lock in whatever state. So nothing here waits: not for another thread (which may
// need the allocator to go on), not for a lane, not for the device, not for the interpreter lock. Far below the
// budget a call costs one look at the allocator's counters. Since the size that missed is unknown, blocks go
// until a headroom is free; from the second step on the plan has left that room already.
//
// There is no way to unregister a callback: it is registered with the first run and does nothing without one.
#pragma once

#include <cstdint>
#include <list>

#include "csrc/transfer/device_backend.h"

namespace hydra {

/// The part of the budget that is kept free for the allocation that missed: one eighth.
inline constexpr Bytes kReliefHeadroomDivisor = 8;

/// While it lives the calling thread's allocations do not ask for relief.
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
