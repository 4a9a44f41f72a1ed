// A CUDA device behind the backend interface, without torch. A function tells the stream that compute runs on.
//
// Slots are allocated on the main stream (home()), and usually all compute runs there. Compute on other streams is
// covered too. record() marks both the main stream and the caller's current stream; record_use() marks single
// operations off the main stream. A slot returns to its allocator behind all marks.
// Only compute_waits() blocks the host, and only until the lane has enqueued the copy.
// Owns its lanes, its events and the slots' resource, not the streams. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "csrc/transfer/cuda/cuda_lane.h"
#include "csrc/transfer/cuda/cuda_stall_log.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

/// The calling thread's compute stream on the device of the backend.
using CurrentStream = std::function<cudaStream_t()>;

class CudaDevice : public DeviceBackend {
 public:
  /// `slots` allocates memory that is reused in the order of `home`.
  CudaDevice(int device, cudaStream_t home, CurrentStream current_stream, std::unique_ptr<Resource> slots);
  ~CudaDevice() override;

  std::string name() const override { return "cuda:" + std::to_string(device_); }
  Resource& slots() noexcept override { return *slots_; }
  Lane& to_device() noexcept override { return to_device_; }
  Lane& to_host() noexcept override { return to_host_; }

  FencePtr record() override;
  FencePtr record_use() override;
  void compute_waits(Ticket& ticket) override;
  void compute_follows(const FencePtr& fence) override;
  void slot_returns(Ticket* ticket, const std::vector<FencePtr>& fences) noexcept override;
  void expect_usable() override;
  StallLog* stalls() noexcept override { return &stalls_; }

  int device() const noexcept { return device_; }
  cudaStream_t home() const noexcept { return home_; }
  cudaStream_t to_device_stream() const noexcept { return to_device_.stream(); }
  cudaStream_t to_host_stream() const noexcept { return to_host_.stream(); }

 private:
  FencePtr mark(cudaStream_t first, cudaStream_t second);

  const int device_;
  const cudaStream_t home_;
  const CurrentStream current_stream_;
  CudaEventPool events_;
  CudaStallLog stalls_;
  std::unique_ptr<Resource> slots_;
  CudaLane to_device_;
  CudaLane to_host_;
};

}  // namespace hydra
