// Runs all units of a batch as a scheduler says, on devices that take exactly the seconds that are given.
//
// A unit begins when its device is free and its shard is there. Devices that become free at one time are served in
// their order, before any of them chooses what to load.
//
// Reentrant, without state. Equal batches, policies and seeds have equal schedules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/plan/units/unit_scheduler.h"

namespace hydra {

/// Units of one job that a device runs one after the other, without a wait.
struct UnitRun {
  std::size_t job = 0;
  std::int64_t first = 0;  // positions in the job's chain
  std::int64_t last = 0;
  double start = 0;
};

struct UnitSchedule {
  double makespan = 0;
  double bound = 0;                        // no schedule has a shorter makespan
  std::vector<std::vector<UnitRun>> runs;  // of each device
  std::vector<double> busy_seconds;        // of each device
  std::int64_t units = 0;                  // that were run
  double load_seconds = 0;                 // of all links
  double stalled_seconds = 0;              // that devices waited for loads
};

/// Throws PlanError if the batch makes no sense.
UnitSchedule simulate_units(const UnitBatch& batch, UnitPolicy policy, std::uint64_t seed = 0);

}  // namespace hydra
