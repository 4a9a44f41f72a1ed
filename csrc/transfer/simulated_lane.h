// One direction of a simulated device's link: a lane that copies host memory at the speed of a link.
//
// One clock runs through all pieces of a busy lane, so a thread that wakes up late does not delay later pieces.
// A piece takes the longer of its memcpy and bytes / bandwidth. A job waits for the latency once, before its first
// byte. Threads: as WorkerLane.
#pragma once

#include <memory>
#include <shared_mutex>

#include "csrc/transfer/compute_lane.h"
#include "csrc/transfer/hazard_log.h"
#include "csrc/transfer/simulated_device.h"
#include "csrc/transfer/worker_lane.h"

namespace hydra {

/// The state that both lanes and the compute lane of one device share. `compute` is null in the plain mode.
struct SimulatedMemory {
  /// Copies hold it shared, and kernels that change bytes hold it exclusively. So a missing fence gives
  /// wrong bytes, not a data race.
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
  /// The time at which the link has moved all its pieces. May be slightly in the past while the lane is busy.
  Clock::time_point link_free_;
};

}  // namespace hydra
