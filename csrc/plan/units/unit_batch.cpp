#include "csrc/plan/units/unit_batch.h"

#include <cmath>

#include "csrc/plan/chain.h"

namespace hydra {

namespace {

constexpr std::int64_t kMostDevices = 4096;
constexpr std::int64_t kMostUnits = 100'000'000;  // of all jobs: a schedule is some bytes for each

bool is_amount(double value) { return std::isfinite(value) && value >= 0; }

void check_job(const UnitJob& job) {
  HYDRA_EXPECT(!job.units.empty(), PlanError, "job '" + job.name + "' has no units: give at least one");
  HYDRA_EXPECT(job.repeats >= 1, PlanError,
               "job '" + job.name + "' repeats its units " + std::to_string(job.repeats) + " times: give at least 1");
  for (const ShardUnit& unit : job.units) {
    HYDRA_EXPECT(is_amount(unit.seconds) && is_amount(unit.bytes), PlanError,
                 "job '" + job.name + "' has a unit of " + std::to_string(unit.seconds) + " s and " +
                     std::to_string(unit.bytes) + " bytes: give finite numbers of at least 0");
  }
}

}  // namespace

void check_units(const UnitBatch& batch) {
  HYDRA_EXPECT(batch.devices >= 1 && batch.devices <= kMostDevices, PlanError,
               "there are " + std::to_string(batch.devices) + " devices: give a number from 1 to " +
                   std::to_string(kMostDevices));
  HYDRA_EXPECT(!batch.link || (std::isfinite(*batch.link) && *batch.link > 0), PlanError,
               "the link moves " + std::to_string(batch.link.value_or(0)) +
                   " bytes per second: give a finite number above 0, or none if loads take no time");
  std::int64_t room = kMostUnits;
  double seconds = 0;
  for (const UnitJob& job : batch.jobs) {
    check_job(job);
    const auto units = static_cast<std::int64_t>(job.units.size());
    HYDRA_EXPECT(job.repeats <= room / units, PlanError,
                 "job '" + job.name + "' has " + std::to_string(units) + " units " + std::to_string(job.repeats) +
                     " times, and there is room for " + std::to_string(room) + " of " + std::to_string(kMostUnits) +
                     " units: give larger units, or fewer minibatches");
    room -= units * job.repeats;
    for (const ShardUnit& unit : job.units) {
      const double load = batch.link ? unit.bytes / *batch.link : 0;
      seconds += (unit.seconds + load) * static_cast<double>(job.repeats);
    }
  }
  HYDRA_EXPECT(std::isfinite(seconds), PlanError, "the units' seconds are too many to count: give smaller numbers");
}

}  // namespace hydra
