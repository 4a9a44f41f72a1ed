#include "emulator/cudart/machine.h"

#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace emulated_cuda::cudart {

ThreadState& this_thread() noexcept {
  thread_local ThreadState state;
  return state;
}

Machine& Machine::get() {
  static Machine& machine = *std::make_unique<Machine>().release();
  return machine;
}

Machine::Machine() : home_process_(::getpid()) {
  for (int number = 0; number < kMostDevices; ++number) {
    devices_.at(static_cast<std::size_t>(number)) = std::make_unique<Device>(number);
  }
  configure({});
}

bool Machine::forked() const noexcept { return ::getpid() != home_process_; }

void Machine::configure(const MachineOptions& options) {
  if (options.devices < 1 || options.devices > kMostDevices) {
    throw std::logic_error("a machine has 1 to " + std::to_string(kMostDevices) + " devices, not " +
                           std::to_string(options.devices));
  }
  for (const auto& device : devices_) {
    if (device->memory.in_use()) {
      throw std::logic_error("the machine cannot change: memory of cuda:" + std::to_string(device->number) +
                             " is in use");
    }
  }
  for (const auto& device : devices_) {
    device->memory.set_capacity(options.bytes);
  }
  devices_in_use_ = options.devices;
}

void Machine::reset() {
  std::vector<std::shared_ptr<Stream>> streams_now = all_streams();
  Garbage garbage;
  {
    const std::lock_guard lock(mutex_);
    garbage = std::exchange(garbage_, {});
  }
  streams_now.insert(streams_now.end(), garbage.streams.begin(), garbage.streams.end());
  for (const auto& stream : streams_now) {
    stream->drain();
    stream->capturing() = false;
  }
  for (const auto& release : garbage.releases) {
    release();
  }
  capturing_ = 0;
  wrong_device = false;
  script.clear();
  set_delays(0.0, 0);
  for (const auto& device : devices_) {
    device->fault = cudaSuccess;
  }
}

// ---- streams --------------------------------------------------------------------------------------------------------

std::shared_ptr<Stream> Machine::make_stream(int device, int number, int priority) {
  auto stream = std::make_shared<Stream>(device, number, priority, this->device(device).fault);
  stream->set_delays(delays_.longest_seconds, delays_.seed);
  return stream;
}

cudaStream_t Machine::add_stream(int priority) {
  const std::lock_guard lock(mutex_);
  // The lowest number that is free: then a test's delays do not depend on the tests before it.
  int number = kMostDevices;
  while (numbers_.contains(number)) {
    ++number;
  }
  const cudaStream_t handle = streams.add(make_stream(this_thread().device, number, priority));
  numbers_.insert(number);
  return handle;
}

std::shared_ptr<Stream> Machine::default_stream(int device) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Stream>& stream = default_streams_.at(static_cast<std::size_t>(device));
  if (!stream) {
    stream = make_stream(device, device, 0);
  }
  return stream;
}

std::shared_ptr<Stream> Machine::find_stream(cudaStream_t handle) {
  return handle == nullptr ? default_stream(this_thread().device) : streams.find(handle);
}

cudaError_t Machine::destroy_stream(cudaStream_t handle) {
  std::shared_ptr<Stream> stream = streams.find(handle);
  if (stream) {
    stream->wait();  // while it is still known, so that a fault of its device ends the wait
    stream = streams.remove(handle);
  }
  if (!stream) {
    return cudaErrorInvalidResourceHandle;
  }
  if (stream->capturing().exchange(false)) {
    --capturing_;
  }
  const std::lock_guard lock(mutex_);
  numbers_.erase(stream->number());
  if (!stream->idle()) {  // only of a failed device
    garbage_.streams.push_back(std::move(stream));
  }
  return cudaSuccess;
}

std::vector<std::shared_ptr<Stream>> Machine::all_streams(int device) {
  std::vector<std::shared_ptr<Stream>> found = streams.all();
  {
    const std::lock_guard lock(mutex_);
    for (const auto& stream : default_streams_) {
      if (stream) {
        found.push_back(stream);
      }
    }
  }
  if (device >= 0) {
    std::erase_if(found, [device](const auto& stream) { return stream->device() != device; });
  }
  return found;
}

void Machine::wait_for(const Device& device) {
  for (const auto& stream : all_streams(device.number)) {
    stream->wait();
  }
}

void Machine::set_delays(double longest_seconds, std::uint64_t seed) {
  {
    const std::lock_guard lock(mutex_);
    delays_ = {.longest_seconds = longest_seconds, .seed = seed};
  }
  for (const auto& stream : all_streams()) {
    stream->set_delays(longest_seconds, seed);
  }
}

// ---- failures and captures ------------------------------------------------------------------------------------------

void Machine::set_fault(int device, cudaError_t error) {
  cudaError_t none = cudaSuccess;
  if (!this->device(device).fault.compare_exchange_strong(none, error)) {
    return;  // the first one stays
  }
  for (const auto& stream : all_streams(device)) {
    stream->drop();
  }
}

cudaError_t Machine::give_back(int device, std::function<cudaError_t(DeviceMemory&)> release) {
  if (!has_device(device)) {
    return cudaErrorInvalidDevice;
  }
  Device& owner = this->device(device);
  wait_for(owner);
  if (owner.fault == cudaSuccess) {
    return release(owner.memory);
  }
  const std::lock_guard lock(mutex_);
  garbage_.releases.emplace_back([&owner, release = std::move(release)] { release(owner.memory); });
  return owner.fault;
}

void Machine::set_capturing(cudaStream_t handle, bool capturing) {
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream && stream->capturing().exchange(capturing) != capturing) {
    capturing_ += capturing ? 1 : -1;
  }
}

}  // namespace emulated_cuda::cudart
