// Turns CUDA's status codes into our errors, which name the call, the bytes asked for, and the device's free memory.
//
// Every status of the runtime passes through here. A refused allocation becomes OutOfMemory, and all other errors
// become TransferError. Destructors use forget_cuda_error(): they have no caller to throw to, and the runtime may have
// been unloaded (cudaErrorCudartUnloading). Both functions clear the runtime's last error, which torch would report as
// its own. Threads: any; a guard belongs to its thread.
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/base/types.h"

namespace hydra {

[[noreturn]] void throw_cuda_error(cudaError_t status, const char* call, Bytes asked);

/// Throws unless `status` is success. `asked` is the bytes that the call should have moved or allocated, for the
/// message.
inline void check_cuda(cudaError_t status, const char* call, Bytes asked = 0) {
  if (status != cudaSuccess) [[unlikely]] {
    throw_cuda_error(status, call, asked);
  }
}

void forget_cuda_error(cudaError_t status) noexcept;

/// Makes `device` the calling thread's current device for a scope. The handle of the default stream means that of the
/// current device, so every call that takes a stream needs this guard.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int device);
  ~CudaDeviceGuard();
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// Lets the calling thread query and wait for a scope, while another thread captures a CUDA graph. Otherwise such calls
/// fail, and spoil the capture. Nothing that the thread calls in the scope may concern the capture.
class CudaCaptureGuard {
 public:
  CudaCaptureGuard() noexcept;
  ~CudaCaptureGuard();
  CudaCaptureGuard(const CudaCaptureGuard&) = delete;
  CudaCaptureGuard& operator=(const CudaCaptureGuard&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace hydra

/// HYDRA_CUDA(cudaEventRecord(event, stream)) throws if the call fails.
#define HYDRA_CUDA(call) ::hydra::check_cuda((call), #call)
