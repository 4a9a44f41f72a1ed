// What every call of the runtime does besides its work. It is counted, charged to host time, and fails as scripted. It
// is refused in a forked child and on a failed device. Its error becomes the thread's last one. No exception leaves it.
// Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <new>

#include "emulator/cudart/machine.h"
#include "emulator/cudart/virtual_clock.h"

namespace emulated_cuda::cudart {

/// How a call differs from others.
enum CallTraits : unsigned {
  kUsesDevice = 0,
  kUsesThread = 1,       // no device: it works when the current device has failed
  kWaits = 2,            // refused on a stream's thread, which would wait for itself
  kFailsLate = 4,        // a scripted failure comes after the wait, as errors of earlier work do
  kUnsafeInCapture = 8,  // refused during a capture, unless the thread's capture mode allows it
  kGivesBack = 16,       // done on a failed device as well, whose error it returns
};

/// Why the call must not do its work, or cudaSuccess.
cudaError_t begin_call(const char* name, unsigned traits);
/// The error to return after the work gave `error`.
cudaError_t end_call(const char* name, unsigned traits, cudaError_t error);
/// Makes an error the thread's last one.
cudaError_t note_error(cudaError_t error) noexcept;

/// Calls `work`, which returns a cudaError_t, as the call of this name.
template <class Work>
cudaError_t call(const char* name, unsigned traits, Work work) noexcept {
  try {
    const Pause pause;
    cudaError_t error = begin_call(name, traits);
    if (error == cudaSuccess) {
      error = end_call(name, traits, work());
    }
    return note_error(error);
  } catch (const std::bad_alloc&) {
    return note_error(cudaErrorMemoryAllocation);
  } catch (...) {
    return note_error(cudaErrorUnknown);
  }
}

/// Calls `work` with the stream. Notes a stream that is not of the current device. Returns the fault of the stream's
/// device, if it has one now or after the work.
template <class Work>
cudaError_t with_stream(cudaStream_t handle, Work work) {
  Machine& machine = Machine::get();
  const std::shared_ptr<Stream> stream = machine.find_stream(handle);
  if (!stream) {
    return cudaErrorInvalidResourceHandle;
  }
  if (stream->device() != this_thread().device) {
    machine.wrong_device = true;
  }
  const Fault& fault = machine.device(stream->device()).fault;
  if (fault != cudaSuccess) {
    return fault;
  }
  const cudaError_t error = work(*stream);
  return fault == cudaSuccess ? error : fault.load();
}

/// Calls `work` with the event. Returns the fault of its device, if it has one now or after the work.
template <class Work>
cudaError_t with_event(cudaEvent_t handle, Work work) {
  const std::shared_ptr<Event> event = Machine::get().events.find(handle);
  if (!event) {
    return cudaErrorInvalidResourceHandle;
  }
  const Fault& fault = Machine::get().device(event->device()).fault;
  if (fault != cudaSuccess) {
    return fault;
  }
  const cudaError_t error = work(*event);
  return fault == cudaSuccess ? error : fault.load();
}

/// Enqueues work that runs foreign code: an exception that leaves it is a fault of the device.
void push_foreign(Stream& stream, std::function<void()> work, const Task& task = {});

}  // namespace emulated_cuda::cudart
