#include "emulator/cudart/control.h"

#include <stdexcept>
#include <utility>

#include "emulator/cudart/call.h"

namespace emulated_cuda {

using namespace cudart;

// ---- the machine ----------------------------------------------------------------------------------------------------

void configure(const MachineOptions& options) { Machine::get().configure(options); }

void reset() { Machine::get().reset(); }

void set_delays(double longest_seconds, std::uint64_t seed) {
  Machine::get().streams.set_delays(longest_seconds, seed);
}

// ---- work -----------------------------------------------------------------------------------------------------------

cudaError_t launch(cudaStream_t stream, std::function<void()> kernel, const KernelWork& work) {
  return call("cudaLaunchKernel", kUsesDevice, [&] {
    return with_stream(stream, [&](Stream& known) {
      if (known.device() != this_thread().device) {
        return cudaErrorInvalidResourceHandle;  // copies may cross devices, kernels may not
      }
      if (VirtualClock& clock = VirtualClock::get(); clock.runs()) {
        HostTime::get().count_this_thread();
        clock.charge(clock.speeds().launch_seconds);
      }
      push_foreign(known, std::move(kernel), Task::of(work));
      return cudaSuccess;
    });
  });
}

bool on_stream_thread() noexcept { return in_stream_thread(); }

// ---- memory ---------------------------------------------------------------------------------------------------------

cudaError_t reserve_addresses(void** pointer, std::size_t bytes, int device) {
  return call("reserve_addresses", kUsesDevice, [&] {
    return Machine::get().has_device(device) ? Machine::get().device(device).memory.reserve(pointer, bytes)
                                             : cudaErrorInvalidDevice;
  });
}

cudaError_t free_addresses(void* pointer, std::size_t bytes, int device) {
  return call("free_addresses", kGivesBack, [&] {
    return Machine::get().give_back(device, [=](DeviceMemory& memory) { return memory.unreserve(pointer, bytes); });
  });
}

cudaError_t map_memory(void* pointer, std::size_t bytes, int device) {
  return call("map_memory", kUsesDevice, [&] {
    return Machine::get().has_device(device) ? Machine::get().device(device).memory.map(pointer, bytes)
                                             : cudaErrorInvalidDevice;
  });
}

cudaError_t unmap_memory(void* pointer, std::size_t bytes, int device) {
  return call("unmap_memory", kWaits | kGivesBack, [&] {
    return Machine::get().give_back(device, [=](DeviceMemory& memory) { return memory.unmap(pointer, bytes); });
  });
}

// ---- failures -------------------------------------------------------------------------------------------------------

void fail(const std::string& call, cudaError_t error, int successes) {
  Machine::get().script.fail(call, error, successes);
}

void set_fault(int device, cudaError_t error) { Machine::get().set_fault(device, error); }

void set_capturing(cudaStream_t stream, bool capturing) {
  Machine& machine = Machine::get();
  if (const auto known = machine.find_stream(stream)) {
    machine.streams.set_capturing(*known, capturing);
  }
}

// ---- counts ---------------------------------------------------------------------------------------------------------

int streams() noexcept { return Machine::get().streams.size(); }

int events() noexcept { return Machine::get().events.size(); }

int registrations() noexcept { return Machine::get().registrations; }

std::size_t allocations() noexcept {
  std::size_t count = 0;
  for (int device = 0; device < kMostDevices; ++device) {
    count += Machine::get().device(device).memory.allocations();
  }
  return count;
}

bool wrong_device() noexcept { return Machine::get().wrong_device; }

std::int64_t calls(const std::string& name) { return Machine::get().script.calls(name); }

}  // namespace emulated_cuda
