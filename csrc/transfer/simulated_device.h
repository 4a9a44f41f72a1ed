// A device made of host memory, for machines without a GPU and for tests.
//
// Compute runs on the caller's thread. In the plain mode it is synchronous: fences are null, and compute_waits() blocks
// the host. In the asynchronous mode the host also computes at once, but a compute lane ends kernels late:
//   note_read   queues a delayed kernel. A copy to the device that overwrites the bytes is a hazard, unless a fence
//               behind that kernel was seen reached;
//   note_write  hides the bytes behind poison, for the host too, until a delayed kernel restores them. A copy that does
//               not wait for a later fence has poison. Copying the bytes in either direction is a hazard, unless such a
//               fence was seen reached.
// A hazard depends on the fences that were seen reached, not on the kernels that happen to have ended. So a missing
// fence is found on any machine at any speed, and a program that waits for its fences never has a hazard.
// Bytes are not compared: they may be released, poisoned or written in compute order.
// Hazards are counted once for each piece and described; they throw no error.
//
// The lanes model a link: a piece takes at least bytes / bandwidth seconds, and a job at least the latency more. The
// host's memory has a bandwidth too, for optimizer steps behind the next forward. A block's update takes at least bytes
// / bandwidth seconds. Unless switched off, slots are filled with poison (0xff: NaN in every floating type) at their
// allocation and release. In the asynchronous mode the next allocation of the same size reuses a released slot at once,
// as in a caching allocator. The device's destructor returns released slots to the heap.
//
// Owns its lanes, its compute lane and its slots. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/transfer/device_backend.h"
#include "csrc/transfer/fault_injector.h"

namespace hydra {

struct SimulatedDeviceOptions {
  double to_device_bytes_per_second = 0.0;  // 0: as fast as memcpy
  double to_host_bytes_per_second = 0.0;
  double latency_seconds = 0.0;
  double host_memory_bytes_per_second = 0.0;  // 0: as fast as the host's memory is
  bool poison = true;
  bool asynchronous = false;
  /// The longest delay of a kernel in the asynchronous mode, counted from its call. Each delay is drawn from
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

  /// The number of hazards so far, and the description of the first one, empty if there is none. Both drain the compute
  /// lane, whose kernels count as seen then. They do not drain the transfer lanes.
  std::int64_t hazards() const;
  std::string first_hazard() const;

 private:
  struct State;
  const double host_memory_bytes_per_second_;
  std::unique_ptr<State> state_;
};

}  // namespace hydra
