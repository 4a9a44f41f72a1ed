#include "csrc/transfer/cuda/cuda_device.h"

#include <utility>

#include "csrc/base/errors.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

/// Waits for all work of the device, or until it fails.
void finish_all(int device) noexcept {
  try {
    const CudaDeviceGuard guard(device);
    const CudaCaptureGuard elsewhere;
    forget_cuda_error(cudaDeviceSynchronize());
  } catch (const std::exception&) {
    forget_cuda_error(cudaErrorUnknown);  // a device that cannot be made current runs nothing
  }
}

}  // namespace

CudaDevice::CudaDevice(int device, cudaStream_t home, CurrentStream current_stream, std::unique_ptr<Resource> slots)
    : device_(device),
      home_(home),
      current_stream_(std::move(current_stream)),
      events_(device, /*timed=*/false),
      stalls_(device, current_stream_),
      slots_(std::move(slots)),
      to_device_(device, cudaMemcpyHostToDevice, activity()),
      to_host_(device, cudaMemcpyDeviceToHost, activity()) {}

CudaDevice::~CudaDevice() = default;

FencePtr CudaDevice::mark(cudaStream_t first, cudaStream_t second) {
  try {
    const CudaDeviceGuard guard(device_);
    std::vector<CudaFence::Mark> marks;
    for (const cudaStream_t stream : {first, second}) {
      if (marks.empty() || stream != first) {
        CudaEventPtr event = events_.take();
        event->record(stream);
        marks.push_back({std::move(event), stream});
      }
    }
    return std::make_shared<CudaFence>(std::move(marks));
  } catch (...) {
    // A block's exit cannot fail, so the copy that waits for this fence fails instead.
    return std::make_shared<CudaFence>(std::current_exception());
  }
}

FencePtr CudaDevice::record() { return mark(home_, current_stream_()); }

FencePtr CudaDevice::record_use() {
  const cudaStream_t current = current_stream_();
  // Every later record() covers operations on the main stream.
  return current == home_ ? nullptr : mark(current, current);
}

void CudaDevice::compute_waits(Ticket& ticket) {
  const Stall stall(&stalls_);
  ticket.wait_enqueued();
  const auto* known = dynamic_cast<const CudaTicket*>(&ticket);
  if (known == nullptr || ticket.finished()) {
    ticket.wait();
    return;
  }
  const CudaDeviceGuard guard(device_);
  known->event()->hold_back(current_stream_());
}

void CudaDevice::compute_follows(const FencePtr& fence) {
  const auto* const mark = dynamic_cast<const CudaFence*>(fence.get());
  if (mark == nullptr) {
    DeviceBackend::compute_follows(fence);
  } else if (!mark->reached()) {
    const Stall stall(&stalls_);
    const CudaDeviceGuard guard(device_);
    mark->hold_back(current_stream_());
  }
}

void CudaDevice::slot_returns(Ticket* ticket, const std::vector<FencePtr>& fences) noexcept {
  const Stall stall(&stalls_);
  try {
    const CudaDeviceGuard guard(device_);
    if (ticket != nullptr) {
      ticket->wait_enqueued();
      const auto* known = dynamic_cast<const CudaTicket*>(ticket);
      if (known != nullptr && !ticket->finished()) {
        known->event()->hold_back(home_);
      } else {
        ticket->wait_quietly();
      }
    }
    for (const FencePtr& fence : fences) {
      if (const auto* mark = dynamic_cast<const CudaFence*>(fence.get())) {
        mark->hold_back(home_);
      } else if (fence) {
        fence->wait();
      }
    }
  } catch (const std::exception&) {
    // A fence that could not be recorded tells of no compute: the host waits for all that there is.
    if (ticket != nullptr) {
      ticket->wait_quietly();
    }
    finish_all(device_);
  }
}

void CudaDevice::expect_usable() {
  const CudaDeviceGuard guard(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  HYDRA_CUDA(cudaStreamIsCapturing(current_stream_(), &status));
  HYDRA_EXPECT(status == cudaStreamCaptureStatusNone, StateError,
               "an offloaded block is used while a CUDA graph is being captured: the graph would keep the block's "
               "present address, and the block moves. Capture outside the offload context, or compile without CUDA "
               "graphs (mode='default')");
}

}  // namespace hydra
