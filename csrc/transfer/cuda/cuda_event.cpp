#include "csrc/transfer/cuda/cuda_event.h"

#include <mutex>

#include "csrc/base/device_turns.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

void CudaEvent::record(cudaStream_t stream) { HYDRA_CUDA(cudaEventRecord(event_, stream)); }

void CudaEvent::hold_back(cudaStream_t stream) const { HYDRA_CUDA(cudaStreamWaitEvent(stream, event_, 0)); }

bool CudaEvent::reached() const noexcept {
  const CudaCaptureGuard guard;
  const cudaError_t status = cudaEventQuery(event_);
  // "Not ready" also becomes the thread's last error.
  forget_cuda_error(status);
  return status != cudaErrorNotReady;
}

cudaError_t CudaEvent::wait() const noexcept {
  const CudaCaptureGuard guard;
  const cudaError_t status = cudaEventSynchronize(event_);
  forget_cuda_error(status);
  return status;
}

struct CudaEventPool::Shelf {
  Shelf(int on_device, bool is_timed) : device(on_device), timed(is_timed) {}
  Shelf(const Shelf&) = delete;
  Shelf& operator=(const Shelf&) = delete;
  ~Shelf() {
    for (const cudaEvent_t event : free) {
      forget_cuda_error(cudaEventDestroy(event));
    }
  }

  void put(cudaEvent_t event) noexcept {
    try {
      const std::lock_guard lock(mutex);
      free.push_back(event);
    } catch (const std::exception&) {
      forget_cuda_error(cudaEventDestroy(event));  // the shelf has no memory to store it
    }
  }

  const int device;
  const bool timed;
  std::mutex mutex;
  std::vector<cudaEvent_t> free;
};

CudaEventPool::CudaEventPool(int device, bool timed) : shelf_(std::make_shared<Shelf>(device, timed)) {}

CudaEventPtr CudaEventPool::take() {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard lock(shelf_->mutex);
    if (!shelf_->free.empty()) {
      event = shelf_->free.back();
      shelf_->free.pop_back();
    }
  }
  if (event == nullptr) {
    const CudaDeviceGuard guard(shelf_->device);
    const unsigned timing = shelf_->timed ? 0U : static_cast<unsigned>(cudaEventDisableTiming);
    HYDRA_CUDA(cudaEventCreateWithFlags(&event, cudaEventBlockingSync | timing));
  }
  const auto give_back = [shelf = shelf_](CudaEvent* done) {
    const std::unique_ptr<CudaEvent> owned(done);
    shelf->put(owned->get());
  };
  return {std::make_unique<CudaEvent>(event).release(), give_back};
}

double CudaEventPool::elapsed_seconds(const CudaEvent& start, const CudaEvent& end) noexcept {
  float milliseconds = 0.0F;
  const cudaError_t status = cudaEventElapsedTime(&milliseconds, start.get(), end.get());
  forget_cuda_error(status);
  return status == cudaSuccess ? static_cast<double>(milliseconds) / 1e3 : 0.0;
}

bool CudaFence::reached() const noexcept {
  if (known_reached_.load(std::memory_order_acquire)) {
    return true;
  }
  for (const Mark& mark : marks_) {
    if (!mark.event->reached()) {
      return false;
    }
  }
  known_reached_.store(true, std::memory_order_release);
  return true;
}

void CudaFence::wait() noexcept {
  if (reached()) {
    return;
  }
  const Pause pause;
  for (const Mark& mark : marks_) {
    mark.event->wait();
  }
}

void CudaFence::hold_back(cudaStream_t stream) const {
  if (error_) {
    std::rethrow_exception(error_);
  }
  if (known_reached_.load(std::memory_order_acquire)) {
    return;
  }
  for (const Mark& mark : marks_) {
    if (mark.stream != stream) {
      mark.event->hold_back(stream);
    }
  }
}

}  // namespace hydra
