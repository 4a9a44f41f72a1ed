// One direction of a simulated device's link: copies host memory at the speed of a link.
//
// The link is a clock that runs on through the pieces of a busy lane, so that a thread that wakes up late
// makes no piece after it later. A piece takes the longer of its memcpy and bytes / bandwidth; a job waits
// for the latency once before its first byte.
#pragma once

#include <memory>
#include <shared_mutex>

#include "csrc/transfer/compute_lane.h"
#include "csrc/transfer/hazard_log.h"
#include "csrc/transfer/simulated_device.h"
#include "csrc/transfer/worker_lane.h"

namespace hydra {

/// What both lanes and the compute lane of one device have in common. `compute` is null in the plain mode.
struct SimulatedMemory {
  /// Held shared by copies and exclusively by kernels that change bytes, so that a missing fence gives
  /// wrong bytes and not a data race.
  std::shared_mutex content;
  HazardLog hazards;
  std::unique_ptr<ComputeLane> compute;
};

struct Link {
  Direction direction = Direction::kToDevice;
  double bytes_per_second = 0.0;  // 0: as fast as memcpy
  double latency_seconds = 0.0;
  std::shared_ptr<FaultInjector> faults = nullptr;
};

class SimulatedLane final : public WorkerLane {
 public:
  /// `memory` and `log` have to outlive the lane.
  SimulatedLane(Link link, SimulatedMemory& memory, ActivityLog& log);
  ~SimulatedLane() override;

 protected:
  void on_thread_start() override;
  void begin(Job& job) override;
  double move(const Segment& piece) override;

 private:
  void look_for_hazards(const Segment& piece);

  const Link link_;
  SimulatedMemory& memory_;
  /// When the link has moved all it was given. May lie a little in the past of a busy lane.
  Clock::time_point link_free_;
};

}  // namespace hydra
