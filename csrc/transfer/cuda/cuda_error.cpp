#include "csrc/transfer/cuda/cuda_error.h"

#include <string>

#include "csrc/base/errors.h"

namespace hydra {

void throw_cuda_error(cudaError_t status, const char* call, Bytes asked) {
  forget_cuda_error(status);
  std::string message =
      std::string("CUDA: ") + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ") from " + call;
  if (asked > 0) {
    message += "; asked for " + human_bytes(asked);
  }
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
    message += "; the device has " + human_bytes(static_cast<Bytes>(free)) + " free of " +
               human_bytes(static_cast<Bytes>(total));
  } else {
    forget_cuda_error(cudaErrorUnknown);
  }
  if (status == cudaErrorMemoryAllocation) {
    throw OutOfMemory(message + "; lower the budget, or free other memory on this device");
  }
  throw TransferError(message + "; if it happens again, run with CUDA_LAUNCH_BLOCKING=1 to find the failed kernel");
}

void forget_cuda_error(cudaError_t status) noexcept {
  if (status != cudaSuccess && status != cudaErrorCudartUnloading) {
    static_cast<void>(cudaGetLastError());
  }
}

CudaDeviceGuard::CudaDeviceGuard(int device) {
  HYDRA_CUDA(cudaGetDevice(&previous_));
  if (previous_ != device) {
    HYDRA_CUDA(cudaSetDevice(device));
    changed_ = true;
  }
}

CudaDeviceGuard::~CudaDeviceGuard() {
  if (changed_) {
    forget_cuda_error(cudaSetDevice(previous_));
  }
}

CudaCaptureGuard::CudaCaptureGuard() noexcept { forget_cuda_error(cudaThreadExchangeStreamCaptureMode(&mode_)); }

CudaCaptureGuard::~CudaCaptureGuard() { forget_cuda_error(cudaThreadExchangeStreamCaptureMode(&mode_)); }

}  // namespace hydra
