// The machine: its devices, their streams, events and memory, and what a test has set.
//
// There is one machine, made at first use and never destroyed, so that threads and destructors at the end of the
// process find it. A forked child finds its parent's machine, which it must not use (`forked`). Each thread has a
// current device, a last error and a capture mode. Streams and events are owned by their handles, together with the
// calls that use them. Thread-safe. Sizes are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "emulator/cudart/control.h"
#include "emulator/cudart/device_memory.h"
#include "emulator/cudart/memory_guard.h"
#include "emulator/cudart/pinned_memory.h"
#include "emulator/cudart/script.h"
#include "emulator/cudart/stream.h"

namespace emulated_cuda::cudart {

struct ThreadState {
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
};
ThreadState& this_thread() noexcept;

struct Device {
  explicit Device(int of_number) noexcept : number(of_number), memory(of_number) {}

  const int number;
  DeviceMemory memory;
  Fault fault{cudaSuccess};
};

/// A handle that no object has yet. Multiples of 64, as addresses of objects would be.
inline std::uintptr_t new_handle() noexcept {
  static std::atomic<std::uintptr_t> last{std::uintptr_t{1} << 20};
  return last += 64;
}

/// The objects behind handles, which are never given twice: a handle that was destroyed is known to be wrong.
template <class Handle, class Object>
class Handles {
 public:
  Handle add(std::shared_ptr<Object> object) {
    const auto handle = reinterpret_cast<Handle>(new_handle());
    const std::lock_guard lock(mutex_);
    objects_.emplace(handle, std::move(object));
    ++size_;
    return handle;
  }
  /// Null if there is no such object.
  std::shared_ptr<Object> find(Handle handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Object> remove(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) {
      return nullptr;
    }
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    --size_;
    return object;
  }
  std::vector<std::shared_ptr<Object>> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Object>> found;
    for (const auto& [handle, object] : objects_) {
      found.push_back(object);
    }
    return found;
  }
  int size() const noexcept { return size_; }

 private:
  mutable std::mutex mutex_;
  std::map<Handle, std::shared_ptr<Object>> objects_;
  std::atomic<int> size_{0};
};

/// All streams, and what is set for all of them.
class StreamTable {
 public:
  cudaStream_t add(Device& device, int priority);
  /// Null if there is no such stream; nullptr is none.
  std::shared_ptr<Stream> find(cudaStream_t handle) const { return streams_.find(handle); }
  /// Made at first use, and never destroyed.
  std::shared_ptr<Stream> default_of(Device& device);
  std::shared_ptr<Stream> remove(cudaStream_t handle);
  /// All streams, or those of one device.
  std::vector<std::shared_ptr<Stream>> all(int device = -1) const;
  int size() const noexcept { return streams_.size(); }

  void set_delays(double longest_seconds, std::uint64_t seed);
  void set_capturing(Stream& stream, bool capturing);
  /// Whether any stream is set to capture.
  bool capturing() const noexcept { return capturing_ > 0; }

 private:
  struct DelayOptions {
    double longest_seconds = 0.0;
    std::uint64_t seed = 0;
  };

  std::shared_ptr<Stream> make(Device& device, int number, int priority);

  Handles<cudaStream_t, Stream> streams_;
  std::atomic<int> capturing_{0};
  mutable std::mutex mutex_;  // of all below
  std::array<std::shared_ptr<Stream>, kMostDevices> default_streams_;
  std::set<int> numbers_;  // of streams; a default stream has its device's
  DelayOptions delays_;
};

class Machine {
 public:
  /// The one machine; nothing else makes another.
  static Machine& get();
  Machine();

  bool forked() const noexcept;
  int devices() const noexcept { return devices_in_use_; }
  bool has_device(int number) const noexcept { return number >= 0 && number < devices_in_use_; }
  Device& device(int number) { return *devices_.at(static_cast<std::size_t>(number)); }
  Device& current() { return device(this_thread().device); }
  void configure(const MachineOptions& options);
  void reset();

  /// Null if there is no such stream. nullptr means the current device's default stream.
  std::shared_ptr<Stream> find_stream(cudaStream_t handle);
  /// Waits for its work. A stream that still runs on a failed device ends at reset().
  cudaError_t destroy_stream(cudaStream_t handle);
  /// Waits for the work so far of all streams of a device, or for the device to fail.
  void wait_for(const Device& device);

  void set_fault(int device, cudaError_t error);
  /// Waits for the device, then releases memory of it. On a failed device reset() does it, since work that already runs
  /// may still use the memory; the result is the fault then.
  cudaError_t give_back(int device, std::function<cudaError_t(DeviceMemory&)> release);

  Script script;
  PinnedMemory pinned;
  StreamTable streams;
  Handles<cudaEvent_t, Event> events;
  std::atomic<int> registrations{0};
  std::atomic<bool> wrong_device{false};

 private:
  /// What a failed device may still use, until reset().
  struct Garbage {
    std::vector<std::shared_ptr<Stream>> streams;
    std::vector<std::function<void()>> releases;
  };

  const int home_process_;
  std::array<std::unique_ptr<Device>, kMostDevices> devices_;
  std::atomic<int> devices_in_use_{0};
  std::mutex mutex_;  // of the garbage
  Garbage garbage_;
};

}  // namespace emulated_cuda::cudart
