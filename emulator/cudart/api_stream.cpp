// CUDA's calls about streams.
#include <algorithm>
#include <utility>

#include "emulator/cudart/call.h"

namespace {

using namespace emulated_cuda;
using namespace emulated_cuda::cudart;

cudaError_t create(cudaStream_t* stream, unsigned flags, int priority) {
  if (flags == cudaStreamDefault) {
    return cudaErrorNotSupported;  // streams that the default stream orders
  }
  if (flags != cudaStreamNonBlocking) {
    return cudaErrorInvalidValue;
  }
  Machine& machine = Machine::get();
  *stream = machine.streams.add(machine.current(), std::clamp(priority, kGreatestPriority, kLeastPriority));
  return cudaSuccess;
}

/// Takes the key of device memory away for a scope, from a stream's thread.
class WithoutDeviceAccess {
 public:
  WithoutDeviceAccess() noexcept { hold_key(false); }
  ~WithoutDeviceAccess() { hold_key(true); }
  WithoutDeviceAccess(const WithoutDeviceAccess&) = delete;
  WithoutDeviceAccess& operator=(const WithoutDeviceAccess&) = delete;
};

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call("cudaStreamCreateWithFlags", kUsesDevice, [&] { return create(stream, flags, kLeastPriority); });
}

cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return call("cudaStreamCreateWithPriority", kUsesDevice, [&] { return create(stream, flags, priority); });
}

cudaError_t CUDARTAPI cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return call("cudaStreamGetPriority", kUsesDevice, [&] {
    return with_stream(stream, [&](Stream& known) {
      *priority = known.priority();
      return cudaSuccess;
    });
  });
}

cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) {
  return call("cudaStreamDestroy", kWaits | kGivesBack, [&] { return Machine::get().destroy_stream(stream); });
}

cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream) {
  return call("cudaStreamQuery", kUsesDevice, [&] {
    return with_stream(stream, [](Stream& known) { return known.idle() ? cudaSuccess : cudaErrorNotReady; });
  });
}

cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  return call("cudaStreamSynchronize", kWaits | kFailsLate | kUnsafeInCapture, [&] {
    return with_stream(stream, [](Stream& known) {
      known.wait();
      return cudaSuccess;
    });
  });
}

cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", kUsesDevice, [&] {
    return with_stream(stream, [&](Stream& known) {
      *status = known.capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
      return cudaSuccess;
    });
  });
}

cudaError_t CUDARTAPI cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                               unsigned long long* id, cudaGraph_t* graph,
                                               const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
                                               std::size_t* count) {
  return call("cudaStreamGetCaptureInfo", kUsesDevice, [&] {
    if (graph != nullptr || dependencies != nullptr || edges != nullptr || count != nullptr) {
      return cudaErrorNotSupported;
    }
    return with_stream(stream, [&](Stream& known) {
      *status = known.capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
      if (id != nullptr) {
        *id = static_cast<unsigned long long>(known.number());
      }
      return cudaSuccess;
    });
  });
}

cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call("cudaThreadExchangeStreamCaptureMode", kUsesThread, [&] {
    std::swap(*mode, this_thread().capture_mode);
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return call("cudaStreamWaitEvent", kUsesDevice, [&] {
    if (flags != cudaEventWaitDefault && flags != cudaEventWaitExternal) {
      return cudaErrorInvalidValue;
    }
    return with_event(event, [&](Event& known_event) {
      return with_stream(stream, [&](Stream& known) {
        if (PointPtr point = known_event.latest()) {
          known.follow(std::move(point));
        }
        return cudaSuccess;
      });
    });
  });
}

cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return call("cudaLaunchHostFunc", kUsesDevice, [&] {
    if (VirtualClock::get().runs()) {
      return cudaErrorNotSupported;
    }
    return with_stream(stream, [&](Stream& known) {
      push_foreign(known, [function, data] {
        const WithoutDeviceAccess scope;
        function(data);
      });
      return cudaSuccess;
    });
  });
}

}  // extern "C"
