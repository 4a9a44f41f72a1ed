// CUDA's calls about events.
#include <chrono>
#include <memory>
#include <utility>

#include "emulator/cudart/call.h"

namespace {

using namespace emulated_cuda;
using namespace emulated_cuda::cudart;

constexpr unsigned kFlags = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;

cudaError_t create(cudaEvent_t* event, unsigned flags) {
  if ((flags & ~kFlags) != 0) {
    return cudaErrorInvalidValue;
  }
  const bool timed = (flags & cudaEventDisableTiming) == 0;
  *event = Machine::get().events.add(std::make_shared<Event>(this_thread().device, timed));
  return cudaSuccess;
}

cudaError_t record(cudaEvent_t event, cudaStream_t stream) {
  return with_event(event, [&](Event& known) {
    return with_stream(stream, [&](Stream& where) {
      if (where.device() != known.device()) {
        return cudaErrorInvalidResourceHandle;
      }
      known.set_latest(where.mark());
      return cudaSuccess;
    });
  });
}

cudaError_t elapsed(float* milliseconds, const Event& start, const Event& end) {
  const PointPtr first = start.latest();
  const PointPtr last = end.latest();
  if (!start.timed() || !end.timed() || start.device() != end.device() || !first || !last) {
    return cudaErrorInvalidResourceHandle;
  }
  if (!first->reached() || !last->reached()) {
    return cudaErrorNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(last->time() - first->time()).count();
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t* event) {
  return call("cudaEventCreate", kUsesDevice, [&] { return create(event, cudaEventDefault); });
}

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", kUsesDevice, [&] { return create(event, flags); });
}

cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  return call("cudaEventDestroy", kGivesBack,
              [&] { return Machine::get().events.remove(event) ? cudaSuccess : cudaErrorInvalidResourceHandle; });
}

cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("cudaEventRecord", kUsesDevice, [&] { return record(event, stream); });
}

cudaError_t CUDARTAPI cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return call("cudaEventRecordWithFlags", kUsesDevice, [&] {
    return flags == cudaEventRecordDefault || flags == cudaEventRecordExternal ? record(event, stream)
                                                                               : cudaErrorInvalidValue;
  });
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  return call("cudaEventQuery", kUnsafeInCapture, [&] {
    return with_event(event, [](const Event& known) {
      const PointPtr point = known.latest();
      return !point || point->reached() ? cudaSuccess : cudaErrorNotReady;
    });
  });
}

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  return call("cudaEventSynchronize", kWaits | kFailsLate | kUnsafeInCapture, [&] {
    return with_event(event, [](const Event& known) {
      if (const PointPtr point = known.latest()) {
        point->wait();
      }
      return cudaSuccess;
    });
  });
}

cudaError_t CUDARTAPI cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call("cudaEventElapsedTime", kUsesDevice, [&] {
    return with_event(start, [&](const Event& first) {
      return with_event(end, [&](const Event& last) { return elapsed(milliseconds, first, last); });
    });
  });
}

// Events of other processes do not exist here; torch's headers name these calls.
cudaError_t CUDARTAPI cudaIpcGetEventHandle(cudaIpcEventHandle_t* /*handle*/, cudaEvent_t /*event*/) {
  return call("cudaIpcGetEventHandle", kUsesDevice, [] { return cudaErrorNotSupported; });
}

cudaError_t CUDARTAPI cudaIpcOpenEventHandle(cudaEvent_t* /*event*/, cudaIpcEventHandle_t /*handle*/) {
  return call("cudaIpcOpenEventHandle", kUsesDevice, [] { return cudaErrorNotSupported; });
}

}  // extern "C"
