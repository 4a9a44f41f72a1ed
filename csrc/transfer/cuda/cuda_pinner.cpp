#include "csrc/transfer/cuda/cuda_pinner.h"

#include <unistd.h>

#include <exception>

#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

CudaPinner::CudaPinner(int device) noexcept : device_(device), owner_process_(::getpid()) {}

bool CudaPinner::pin(void* pointer, Bytes bytes) noexcept {
  if (::getpid() != owner_process_) {
    return false;
  }
  try {
    const CudaDeviceGuard guard(device_);
    const CudaCaptureGuard capture;
    const cudaError_t status = cudaHostRegister(pointer, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
    forget_cuda_error(status);
    return status == cudaSuccess;
  } catch (const std::exception&) {
    return false;  // the device is not available: the arena counts the region as pageable
  }
}

void CudaPinner::unpin(void* pointer, Bytes /*bytes*/) noexcept {
  if (::getpid() != owner_process_) {
    return;
  }
  try {
    const CudaDeviceGuard guard(device_);
    const CudaCaptureGuard capture;
    forget_cuda_error(cudaHostUnregister(pointer));
  } catch (const std::exception&) {
    // The device has failed, and the registration ends with its context.
  }
}

}  // namespace hydra
