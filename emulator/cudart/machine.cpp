#include "emulator/cudart/machine.h"

#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "emulator/cudart/virtual_clock.h"

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
  VirtualClock::get().stop();
  std::vector<std::shared_ptr<Stream>> running = streams.all();
  Garbage garbage;
  {
    const std::lock_guard lock(mutex_);
    garbage = std::exchange(garbage_, {});
  }
  running.insert(running.end(), garbage.streams.begin(), garbage.streams.end());
  for (const auto& stream : running) {
    stream->drain();
    streams.set_capturing(*stream, false);
  }
  for (const auto& release : garbage.releases) {
    release();
  }
  wrong_device = false;
  script.clear();
  streams.set_delays(0.0, 0);
  for (const auto& device : devices_) {
    device->fault = cudaSuccess;
  }
}

std::shared_ptr<Stream> Machine::find_stream(cudaStream_t handle) {
  return handle == nullptr ? streams.default_of(current()) : streams.find(handle);
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
  if (!stream->idle()) {  // only of a failed device
    const std::lock_guard lock(mutex_);
    garbage_.streams.push_back(std::move(stream));
  }
  return cudaSuccess;
}

void Machine::wait_for(const Device& device) {
  for (const auto& stream : streams.all(device.number)) {
    stream->wait();
  }
}

void Machine::set_fault(int device, cudaError_t error) {
  cudaError_t none = cudaSuccess;
  if (!this->device(device).fault.compare_exchange_strong(none, error)) {
    return;  // the first one stays
  }
  for (const auto& stream : streams.all(device)) {
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

// ---- streams --------------------------------------------------------------------------------------------------------

cudaStream_t StreamTable::add(Device& device, int priority) {
  const std::lock_guard lock(mutex_);
  // The lowest number that is free: then a test's delays do not depend on the tests before it.
  int number = kMostDevices;
  while (numbers_.contains(number)) {
    ++number;
  }
  const cudaStream_t handle = streams_.add(make(device, number, priority));
  numbers_.insert(number);
  return handle;
}

std::shared_ptr<Stream> StreamTable::default_of(Device& device) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Stream>& stream = default_streams_.at(static_cast<std::size_t>(device.number));
  if (!stream) {
    stream = make(device, device.number, 0);
  }
  return stream;
}

std::shared_ptr<Stream> StreamTable::remove(cudaStream_t handle) {
  std::shared_ptr<Stream> stream = streams_.remove(handle);
  if (stream) {
    set_capturing(*stream, false);
    const std::lock_guard lock(mutex_);
    numbers_.erase(stream->number());
  }
  return stream;
}

std::vector<std::shared_ptr<Stream>> StreamTable::all(int device) const {
  std::vector<std::shared_ptr<Stream>> found = streams_.all();
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

void StreamTable::set_delays(double longest_seconds, std::uint64_t seed) {
  {
    const std::lock_guard lock(mutex_);
    delays_ = {.longest_seconds = longest_seconds, .seed = seed};
  }
  for (const auto& stream : all()) {
    stream->set_delays(longest_seconds, seed);
  }
}

void StreamTable::set_capturing(Stream& stream, bool capturing) {
  if (stream.capturing().exchange(capturing) != capturing) {
    capturing_ += capturing ? 1 : -1;
  }
}

std::shared_ptr<Stream> StreamTable::make(Device& device, int number, int priority) {
  auto stream = std::make_shared<Stream>(device.number, number, priority, device.fault);
  stream->set_delays(delays_.longest_seconds, delays_.seed);
  return stream;
}

}  // namespace emulated_cuda::cudart
