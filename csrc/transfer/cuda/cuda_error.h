// CUDA's errors as ours: which call, what was asked, what the device had.
//
// Every status of the runtime passes through here. A refused allocation becomes OutOfMemory, everything else
// TransferError. Destructors use forget_cuda_error(): by then there is no caller to tell, and the runtime itself may be
// gone (cudaErrorCudartUnloading). Both clear the runtime's last error, which torch would report as its own.
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/base/types.h"

namespace hydra {

[[noreturn]] void throw_cuda_error(cudaError_t status, const char* call, Bytes asked);

/// Throws unless `status` is success. `asked`: bytes the call was to move or to get, for the message.
inline void check_cuda(cudaError_t status, const char* call, Bytes asked = 0) {
  if (status != cudaSuccess) [[unlikely]] {
    throw_cuda_error(status, call, asked);
  }
}

void forget_cuda_error(cudaError_t status) noexcept;

/// Makes `device` the calling thread's for its lifetime. The default stream's handle means the current device's
/// default stream, so every call that takes a stream is made inside one of these.
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

}  // namespace hydra

/// HYDRA_CUDA(cudaEventRecord(event, stream)): throws what the call failed with.
#define HYDRA_CUDA(call) ::hydra::check_cuda((call), #call)
