// The machine: its devices, their streams, events and memory, and what a test has set.
//
// There is one machine, made at first use and never destroyed, so that threads and destructors at the end of the
// process find it. A forked child finds its parent's machine, which it must not use (`forked`). Each thread has a
// current device, a last error and a capture mode. Thread-safe. Sizes are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "emulator/cudart/control.h"
#include "emulator/cudart/device_memory.h"
#include "emulator/cudart/handles.h"
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

  cudaStream_t add_stream(int priority);
  /// Null if there is no such stream. nullptr means the current device's default stream.
  std::shared_ptr<Stream> find_stream(cudaStream_t handle);
  /// Waits for its work. A stream that still runs on a failed device ends at reset().
  cudaError_t destroy_stream(cudaStream_t handle);
  /// Waits for the work so far of all streams of a device, or for the device to fail.
  void wait_for(const Device& device);
  void set_delays(double longest_seconds, std::uint64_t seed);

  void set_fault(int device, cudaError_t error);
  /// Waits for the device, then releases memory of it. On a failed device reset() does it, since work that already runs
  /// may still use the memory; the result is the fault then.
  cudaError_t give_back(int device, std::function<cudaError_t(DeviceMemory&)> release);
  void set_capturing(cudaStream_t stream, bool capturing);
  bool capturing() const noexcept { return capturing_ > 0; }

  Script script;
  PinnedMemory pinned;
  Handles<cudaStream_t, Stream> streams;
  Handles<cudaEvent_t, Event> events;
  std::atomic<int> registrations{0};
  std::atomic<bool> wrong_device{false};

 private:
  struct DelayOptions {
    double longest_seconds = 0.0;
    std::uint64_t seed = 0;
  };
  struct Garbage {
    std::vector<std::shared_ptr<Stream>> streams;
    std::vector<std::function<void()>> releases;
  };

  std::shared_ptr<Stream> default_stream(int device);
  /// All streams, or those of one device.
  std::vector<std::shared_ptr<Stream>> all_streams(int device = -1);
  std::shared_ptr<Stream> make_stream(int device, int number, int priority);

  const int home_process_;
  std::array<std::unique_ptr<Device>, kMostDevices> devices_;
  std::atomic<int> devices_in_use_{0};
  std::atomic<int> capturing_{0};

  std::mutex mutex_;  // of all below
  std::array<std::shared_ptr<Stream>, kMostDevices> default_streams_;
  std::set<int> numbers_;  // of streams; a default stream has its device's
  DelayOptions delays_;
  Garbage garbage_;
};

}  // namespace emulated_cuda::cudart
