// What a test, and the emulator's other layers, say to the emulated CUDA runtime; code under test includes CUDA's own
// headers, and nothing of the emulator's.
//
// A stream is a thread that runs its work in order, each operation after a delay drawn from a seed. Device memory is
// host memory behind a protection key, which stream threads hold: a host thread that touches it ends the process with
// the address and the name of what lies there, where the machine has such keys (`memory_is_guarded`). A kernel is a
// function. So code that forgets a wait computes wrong bits, and code that reads device memory from the host dies.
// Thread-safe. Sizes are bytes, times seconds. No call takes Python's lock.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace emulated_cuda {

// ---- the machine ----------------------------------------------------------------------------------------------------

/// What a machine is made of. `configure` changes it before the first device memory is taken.
struct MachineOptions {
  int devices = 2;
  std::size_t bytes = std::size_t{8} << 30;  // of each device
};
/// Throws std::logic_error if device memory is in use.
void configure(const MachineOptions& options);
/// Waits for all streams of all devices, then forgets delays, scripted failures, captures and faults.
void reset();
/// Whether a host access to device memory ends the process: the machine has protection keys.
bool memory_is_guarded() noexcept;

// ---- time -----------------------------------------------------------------------------------------------------------

/// One operation in eight waits up to `longest_seconds` before it runs; 0 ends this.
void set_delays(double longest_seconds, std::uint64_t seed);

// ---- a virtual clock, under which nothing is computed ---------------------------------------------------------------

/// What a machine does in a second. Seconds are of each operation, whatever its size.
struct Speeds {
  double half_flops = 1.0;     // products of matrices in float16 and bfloat16
  double full_flops = 1.0;     // products of matrices in other types
  double device_memory = 1.0;  // bytes, as all below
  double to_device = 1.0;
  double to_host = 1.0;
  double host_memory = 1.0;
  double operation_seconds = 0.0;  // of the device: the shortest kernel or copy
  double launch_seconds = 0.0;     // of the host: a kernel
  double call_seconds = 0.0;       // of the host: another call of the runtime that uses the device
};

/// The units of a machine that take time. kNone is the host's program, where something waits for it.
enum class Unit { kNone, kProcessors, kToDevice, kToHost, kHostMemory };
inline constexpr std::size_t kUnits = 5;

struct ClockReport {
  double seconds = 0.0;                 // the time now
  std::array<double, kUnits> busy{};    // seconds by unit
  std::array<double, kUnits> waited{};  // seconds in which the processors had nothing to do, by what they waited for
};

/// From now on time is virtual, kernels and copies only take time, and memory of devices has no pages. Results that
/// come to the host are zeros. One device is meant: units are those of one card. reset() stops the clock.
void start_clock(const Speeds& speeds);
void stop_clock();
bool clock_runs() noexcept;
ClockReport clock_report();
/// Work of the host's memory that is not done: returns when its time has passed.
void use_host_memory(std::int64_t bytes) noexcept;

// ---- work -----------------------------------------------------------------------------------------------------------

/// What a kernel does, for the virtual clock.
struct KernelWork {
  double half_flops = 0.0;
  double full_flops = 0.0;
  double bytes = 0.0;  // read and written
};

/// Enqueues a kernel, which runs on the stream's thread in its turn. nullptr is the current device's default stream.
/// A scripted failure of "cudaLaunchKernel" is returned, and nothing is enqueued. An exception that leaves the kernel
/// becomes a fault of the device, cudaErrorLaunchFailure.
cudaError_t launch(cudaStream_t stream, std::function<void()> kernel, const KernelWork& work = {});
/// Whether the calling thread runs a stream's work now.
bool on_stream_thread() noexcept;

/// Lets the calling thread touch device memory for a scope: for the emulator itself, which copies and poisons.
class DeviceAccess {
 public:
  DeviceAccess() noexcept;
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

 private:
  bool taken_ = false;
};

// ---- memory ---------------------------------------------------------------------------------------------------------

/// The device whose memory this is, or -1.
int device_of(const void* pointer) noexcept;
/// Names bytes for the message of a host access; what lay there before loses its name. The name is copied.
void name_memory(const void* pointer, std::size_t bytes, const std::string& name);

/// Addresses without memory, as cuMemAddressReserve gives: for expandable segments. Aligned to 2 MiB.
cudaError_t reserve_addresses(void** pointer, std::size_t bytes, int device);
cudaError_t free_addresses(void* pointer, std::size_t bytes, int device);
/// Puts memory behind reserved addresses, and takes it away. Whole multiples of 2 MiB; counted as cudaMalloc's.
/// cudaErrorMemoryAllocation if the device has too little. Unmapping waits for the device, as the driver does.
cudaError_t map_memory(void* pointer, std::size_t bytes, int device);
cudaError_t unmap_memory(void* pointer, std::size_t bytes, int device);

// ---- failures -------------------------------------------------------------------------------------------------------

/// Makes the call of this name fail once, after `successes` more calls.
void fail(const std::string& call, cudaError_t error, int successes = 0);
/// The device fails: its streams run nothing more, and every later call on it gives `error`, until reset().
void set_fault(int device, cudaError_t error);
void set_capturing(cudaStream_t stream, bool capturing);

// ---- counts of what exists now --------------------------------------------------------------------------------------

int streams() noexcept;
int events() noexcept;
int registrations() noexcept;
std::size_t allocations() noexcept;
/// Whether any thread used a stream or an event of a device that was not its current one.
bool wrong_device() noexcept;
/// Calls of this name since reset(), failed ones too.
std::int64_t calls(const std::string& name);

}  // namespace emulated_cuda
