// Calls of the CUDA runtime for the caching allocator: a failed one is an exception, and no longer the last error.
//
// Threads: any; an OnDevice belongs to its thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <stdexcept>

namespace emulated_cuda::runtime {

/// A call of the runtime failed, for another reason than too little memory.
class CudaFailure : public std::runtime_error {
 public:
  explicit CudaFailure(cudaError_t status) : std::runtime_error(cudaGetErrorString(status)), status_(status) {}
  cudaError_t status() const noexcept { return status_; }

 private:
  cudaError_t status_;
};

/// Clears the last error.
void forget_error() noexcept;
/// Throws CudaFailure unless the call succeeded.
void check(cudaError_t status);
/// Whether a call that asks for memory got it. Throws CudaFailure if it failed for another reason.
bool granted(cudaError_t status);
/// The memory of the current device.
std::size_t total_bytes();

/// Makes a device current for a scope. If the device has failed, the calls within fail, and say so.
class OnDevice {
 public:
  explicit OnDevice(int device) noexcept;
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// Allows the thread, for a scope, calls that CUDA refuses while it captures `stream`, if it does.
class CaptureAllowed {
 public:
  explicit CaptureAllowed(cudaStream_t stream) noexcept;
  ~CaptureAllowed();
  CaptureAllowed(const CaptureAllowed&) = delete;
  CaptureAllowed& operator=(const CaptureAllowed&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool changed_ = false;
};

/// The end of the work that a stream of `device` has at construction.
class StreamEvent {
 public:
  StreamEvent(int device, cudaStream_t stream);
  ~StreamEvent();
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  bool is_done() const;
  void wait() const;

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace emulated_cuda::runtime
