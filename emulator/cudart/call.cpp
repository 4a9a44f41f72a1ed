#include "emulator/cudart/call.h"

#include <utility>

namespace emulated_cuda::cudart {

cudaError_t begin_call(const char* name, unsigned traits) {
  Machine& machine = Machine::get();
  if (machine.forked()) {
    return cudaErrorInitializationError;
  }
  machine.script.count(name);
  if (VirtualClock& clock = VirtualClock::get(); clock.runs() && (traits & kUsesThread) == 0) {
    clock.charge(clock.speeds().call_seconds);
  }
  if ((traits & kWaits) != 0 && in_stream_thread()) {
    return cudaErrorNotPermitted;
  }
  if (const cudaError_t fault = machine.current().fault;
      fault != cudaSuccess && (traits & (kUsesThread | kGivesBack)) == 0) {
    return fault;
  }
  if ((traits & kUnsafeInCapture) != 0 && machine.streams.capturing() &&
      this_thread().capture_mode == cudaStreamCaptureModeGlobal) {
    return cudaErrorStreamCaptureUnsupported;
  }
  return (traits & kFailsLate) == 0 ? machine.script.take_failure(name) : cudaSuccess;
}

cudaError_t end_call(const char* name, unsigned traits, cudaError_t error) {
  Machine& machine = Machine::get();
  if (const cudaError_t fault = machine.current().fault; fault != cudaSuccess && (traits & kGivesBack) != 0) {
    return fault;
  }
  return error == cudaSuccess && (traits & kFailsLate) != 0 ? machine.script.take_failure(name) : error;
}

cudaError_t note_error(cudaError_t error) noexcept {
  if (error != cudaSuccess) {
    this_thread().last_error = error;
  }
  return error;
}

void push_foreign(Stream& stream, std::function<void()> work, const Task& task) {
  const auto guarded = [device = stream.device(), work = std::move(work)] {
    try {
      work();
    } catch (...) {
      Machine::get().set_fault(device, cudaErrorLaunchFailure);
    }
  };
  stream.push(guarded, task);
}

}  // namespace emulated_cuda::cudart
