// Pooled CUDA events, and the fences made of them.
//
// An event returns to its pool with its last owner, and may be recorded again while earlier waits for it are
// pending: a wait concerns the record that was current when the wait was enqueued. Events may outlive the pool object;
// all are destroyed when the last of them has returned. Thread-safe.
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

  /// The caller's current device has to be the event's device (CudaDeviceGuard).
  void record(cudaStream_t stream);
  /// Makes later work on `stream` start after the event. Does not block.
  void hold_back(cudaStream_t stream) const;
  /// Also true if the device has failed, since no work runs any more.
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
  /// With `timed`, elapsed_seconds() works, at some cost for each event.
  CudaEventPool(int device, bool timed);

  CudaEventPtr take();
  static double elapsed_seconds(const CudaEvent& start, const CudaEvent& end) noexcept;

 private:
  struct Shelf;
  std::shared_ptr<Shelf> shelf_;
};

/// A fence with one event for each stream that it covers. It is reached when all events are. A fence that could not be
/// recorded carries the error, and hold_back() throws it.
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
  /// Makes later work on `stream` wait, except for events that were recorded on it. Throws the fence's error, if it has
  /// one.
  void hold_back(cudaStream_t stream) const;

 private:
  const std::vector<Mark> marks_;
  const std::exception_ptr error_;
  mutable std::atomic<bool> known_reached_{false};
};

}  // namespace hydra
