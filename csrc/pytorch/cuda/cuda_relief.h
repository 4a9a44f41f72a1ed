// The safety net on CUDA: makes room before an allocation of torch's fails, and measures what torch allocates.
//
// The first run puts an allocator in front of torch's own, for good. It passes every call on. While a run serves a
// device, an allocation there asks the run for room until it fits into the budgets, then asks torch. If torch refuses,
// because free memory lies in pieces or on another stream, it evicts as much again and retries. torch releases its
// cache at each refusal. If no run can make more room, the caller gets torch's error, with what the runs hold. For an
// allocation above the budgets no room is made: it fails at once, with the same text.
//
// All this happens outside the locks of torch's allocator. A call may block; the run releases the interpreter lock for
// it.
// Allocations of slots are exempt, since the pager makes room for them itself, and so are those under graph capture.
// Without a run, a call costs one look at a counter. Threads: any. Sizes are bytes.
#pragma once

#include "csrc/pytorch/cuda/cuda_slots.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

/// Exempts the calling thread's allocations from relief, for a scope.
class CudaReliefPause {
 public:
  CudaReliefPause() noexcept;
  ~CudaReliefPause();
  CudaReliefPause(const CudaReliefPause&) = delete;
  CudaReliefPause& operator=(const CudaReliefPause&) = delete;
};

/// Serves allocations on the slots' device through `client`, and lets the slots measure them, for its lifetime. Its
/// constructor and destructor wait for calls under way, without the interpreter lock.
class CudaRelief {
 public:
  /// `slots` have to outlive it.
  CudaRelief(MemoryClient client, CudaSlots& slots);
  ~CudaRelief();
  CudaRelief(const CudaRelief&) = delete;
  CudaRelief& operator=(const CudaRelief&) = delete;

  const MemoryClient& client() const noexcept { return client_; }
  CudaSlots& slots() const noexcept { return slots_; }

 private:
  const MemoryClient client_;
  CudaSlots& slots_;
};

}  // namespace hydra
