#include "emulator/c10_cuda/runtime_calls.h"

namespace emulated_cuda::runtime {

void forget_error() noexcept { static_cast<void>(cudaGetLastError()); }

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    forget_error();
    throw CudaFailure(status);
  }
}

bool granted(cudaError_t status) {
  if (status == cudaErrorMemoryAllocation) {
    forget_error();
    return false;
  }
  check(status);
  return true;
}

std::size_t total_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total));
  return total;
}

OnDevice::OnDevice(int device) noexcept
    : changed_(cudaGetDevice(&before_) == cudaSuccess && before_ != device && cudaSetDevice(device) == cudaSuccess) {}

OnDevice::~OnDevice() {
  if (changed_) {
    static_cast<void>(cudaSetDevice(before_));
  }
}

CaptureAllowed::CaptureAllowed(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  changed_ = cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone &&
             cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
}

CaptureAllowed::~CaptureAllowed() {
  if (changed_) {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
}

StreamEvent::StreamEvent(int device, cudaStream_t stream) {
  const OnDevice current(device);
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  const cudaError_t status = cudaEventRecord(event_, stream);
  if (status != cudaSuccess) {
    static_cast<void>(cudaEventDestroy(event_));
    check(status);
  }
}

StreamEvent::~StreamEvent() { static_cast<void>(cudaEventDestroy(event_)); }

bool StreamEvent::is_done() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    forget_error();
    return false;
  }
  check(status);
  return true;
}

void StreamEvent::wait() const { check(cudaEventSynchronize(event_)); }

}  // namespace emulated_cuda::runtime
