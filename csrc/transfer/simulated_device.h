// A device made of host memory, for machines without one and for tests.
//
// Compute is whatever runs on the caller's thread. In the plain mode it is synchronous: fences are null and
// compute_waits() blocks the host. In the asynchronous mode a compute lane finishes late, though the host
// has computed already:
//   note_read   queues a delayed kernel. A copy to the device that overwrites the bytes before a fence
//               behind that kernel was seen reached is a hazard;
//   note_write  hides the bytes (they read as poison, for the host too) until a delayed kernel puts them
//               back: a copy made without waiting for a fence recorded afterwards has poison, and
//               copying them in either direction before such a fence was seen reached is a hazard.
// Fences are the only news of compute, so a hazard is judged by what was seen, not by what happened to be
// over: a missing fence is found on any machine, at any speed, and a respected one never raises an alarm.
// The bytes themselves are not compared: they may be released, poisoned or written in compute order.
// Hazards are counted (once for each piece) and described, and throw nothing.
//
// The lanes model a link: a piece takes at least bytes / bandwidth seconds, a job at least latency more. So is the
// host's memory, for optimizer steps behind the next forward: what a block's reads and writes takes at least bytes /
// bandwidth. Slots are filled with poison (0xff: NaN in every floating type) when allocated and when released, unless
// told otherwise. In the asynchronous mode released ones are kept for immediate reuse by the next allocation
// of the same size, as a caching allocator would, and return to the heap with the device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/transfer/device_backend.h"

namespace hydra {

enum class Direction : std::uint8_t { kToDevice, kToHost };

/// Scripted faults. Called on the lane's thread, on the thread that allocates, or on the compute lane's
/// thread. Thread-safe.
class FaultInjector {
 public:
  virtual ~FaultInjector() = default;
  /// Before a job's first byte. May sleep; may throw what the job's ticket shall carry.
  virtual void before_job(Direction direction) = 0;
  /// Before a slot is allocated. May throw OutOfMemory.
  virtual void before_slot(Bytes bytes) = 0;
  /// Before a kernel of the asynchronous mode ends. May block, and holds all later kernels up then.
  virtual void before_kernel() noexcept {}
};

struct SimulatedDeviceOptions {
  double to_device_bytes_per_second = 0.0;  // 0: as fast as memcpy
  double to_host_bytes_per_second = 0.0;
  double latency_seconds = 0.0;
  double host_memory_bytes_per_second = 0.0;  // 0: as fast as the host's
  bool poison = true;
  bool asynchronous = false;
  /// Longest delay of a kernel in the asynchronous mode, counted from its call; each is drawn anew from
  /// `seed`.
  double kernel_delay_seconds = 0.001;
  std::uint64_t seed = 0;
  std::shared_ptr<FaultInjector> faults = nullptr;
};

class SimulatedDevice final : public DeviceBackend {
 public:
  static constexpr int kPoison = 0xff;

  explicit SimulatedDevice(SimulatedDeviceOptions options = {});
  ~SimulatedDevice() override;

  std::string name() const override { return "simulated"; }
  Resource& slots() noexcept override;
  Lane& to_device() noexcept override;
  Lane& to_host() noexcept override;
  FencePtr record() override;
  void compute_waits(Ticket& ticket) override;
  void note_read(const void* pointer, Bytes bytes) override;
  void note_write(void* pointer, Bytes bytes) override;
  double host_memory_bytes_per_second() const noexcept override { return host_memory_bytes_per_second_; }

  /// Hazards seen so far, and the description of the first one (empty if none). Both drain the compute lane,
  /// which counts as a fence seen; they do not drain the lanes.
  std::int64_t hazards() const;
  std::string first_hazard() const;

 private:
  struct State;
  const double host_memory_bytes_per_second_;
  std::unique_ptr<State> state_;
};

}  // namespace hydra
