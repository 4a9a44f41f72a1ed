// Pooled CUDA events, and the fences made of them.
//
// An event goes back to its pool with its last holder, and may be recorded anew while earlier waits for it are
// still pending: CUDA waits for what was recorded when the wait was enqueued. Events outlive the pool object;
// the pool's events are destroyed when the last of them has come back. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/transfer/fence.h"

namespace hydra {

class CudaEvent {
 public:
  explicit CudaEvent(cudaEvent_t event) noexcept : event_(event) {}
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  /// The caller's current device has to be the event's (CudaDeviceGuard).
  void record(cudaStream_t stream);
  /// Whatever is enqueued on `stream` from here on starts after the event. Does not block.
  void hold_back(cudaStream_t stream) const;
  /// True too when the device has failed: nothing runs any more.
  bool reached() const noexcept;
  /// Blocks the host, without spinning.
  cudaError_t wait() const noexcept;
  cudaEvent_t get() const noexcept { return event_; }

 private:
  cudaEvent_t event_;
};

using CudaEventPtr = std::shared_ptr<CudaEvent>;

class CudaEventPool {
 public:
  /// `timed`: elapsed_seconds() works, at some cost for each event.
  CudaEventPool(int device, bool timed);

  CudaEventPtr take();
  static double elapsed_seconds(const CudaEvent& start, const CudaEvent& end) noexcept;

 private:
  struct Shelf;
  std::shared_ptr<Shelf> shelf_;
};

/// Reached when every one of its events is: one per stream that it covers. A fence that could not be recorded
/// carries the error, and a wait for it on a stream throws it.
class CudaFence final : public Fence {
 public:
  struct Mark {
    CudaEventPtr event;
    cudaStream_t stream = nullptr;
  };

  explicit CudaFence(std::vector<Mark> marks) noexcept : marks_(std::move(marks)) {}
  explicit CudaFence(std::exception_ptr error) noexcept : error_(std::move(error)) {}

  bool reached() const noexcept override;
  void wait() noexcept override;
  /// `stream` waits; the events recorded on it need no wait. Throws the error of a fence that has one.
  void hold_back(cudaStream_t stream) const;

 private:
  const std::vector<Mark> marks_;
  const std::exception_ptr error_;
  mutable std::atomic<bool> known_reached_{false};
};

}  // namespace hydra
