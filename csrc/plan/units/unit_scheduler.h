// Says which job's unit a device runs next, and which shard it loads meanwhile. Plans and runs use the same one.
//
// For each unit a device calls, in this order:
//
//   next      it is free: the unit to run, if one is eligible
//   ahead     the unit has begun: the job whose shard to load into the buffer, if there is a link. That job is promised
//             to the device; another device gets it only if nothing else is eligible, or if it is critical
//   finished  the unit has ended
//
// [Note: critical jobs] A job is critical if its remaining time exceeds the mean of what all devices have left: then
// it alone decides when the last unit ends, and has to run now. As long as no job is critical, every choice that keeps
// devices busy ends equally early, to within a unit. So kLongestResident stays with the resident shard until another
// job is critical.
//
// No device finds nothing in next() while a unit is eligible. A call is O(log n) for n jobs, and with a link O(P) more
// for P devices. Times that next() tells are foreseen ones; no decision depends on them. Threads: one. Units are those
// of unit_batch.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "csrc/plan/units/ready_jobs.h"
#include "csrc/plan/units/unit_batch.h"
#include "csrc/plan/units/unit_chain.h"

namespace hydra {

struct UnitTurn {
  std::size_t job = 0;
  std::int64_t unit = 0;  // its position in the job's chain
  double begin = 0;       // after the load, if it needs one
  double end = 0;
};

class UnitScheduler {
 public:
  /// Throws PlanError if the batch makes no sense.
  UnitScheduler(const UnitBatch& batch, UnitPolicy policy, std::uint64_t seed = 0);

  /// The unit that this device runs next; none if no unit is eligible. Throws PlanError if it runs one.
  std::optional<UnitTurn> next(std::size_t device, double now);

  /// The job whose shard this device loads meanwhile. None without a link, or if there is no such job; after later
  /// units there may be one. Throws PlanError if the device runs no unit.
  std::optional<std::size_t> ahead(std::size_t device, double now);

  /// The device's unit has ended. Throws PlanError if it runs none.
  void finished(std::size_t device);

  /// Seconds of the job's units that have not begun. Throws PlanError if there is no such job.
  double remaining(std::size_t job) const;

  std::int64_t units_left() const { return units_left_; }  // that have not ended
  double load_seconds() const { return load_seconds_; }    // of all loads so far
  std::span<const UnitChain> chains() const { return chains_; }

 private:
  struct Job {
    std::int64_t begun = 0;             // units that have begun
    std::optional<std::size_t> device;  // that ran the last one
    bool is_running = false;
  };

  /// A job that a device will run. Other devices see it as eligible, unless it runs.
  struct Promise {
    ReadyJob entry;
    double loaded = 0;  // when its shard is there
  };

  struct Device {
    std::optional<std::size_t> last_job;
    bool is_running = false;
    std::optional<ReadyJob> kept;  // the last job, whose next unit has the resident shard
    std::optional<Promise> ahead;
    double link_free = 0;  // from when on
  };

  Device& device_at(std::size_t device, bool is_running);
  std::optional<std::size_t> choose(std::size_t device);
  std::optional<ReadyJob> critical_job(const ReadyJob& choice) const;
  std::optional<ReadyJob> longest_promised(std::optional<std::size_t> but) const;
  std::optional<Promise> promise(Device& device, double now);
  double load(Device& device, std::size_t job, std::int64_t position, double now);
  void withdraw(std::size_t job);
  void release(std::size_t job);
  bool is_resident(std::size_t device, std::size_t job) const;
  double rank(std::size_t job, std::int64_t position) const;
  bool stays() const { return policy_ == UnitPolicy::kLongestResident && has_link_; }
  bool is_longest_first() const { return policy_ == UnitPolicy::kLongest || policy_ == UnitPolicy::kLongestResident; }

  UnitPolicy policy_;
  bool has_link_;
  std::vector<UnitChain> chains_;
  std::vector<Job> jobs_;
  std::vector<Device> devices_;
  ReadyJobs ready_;
  std::int64_t units_left_ = 0;
  double waiting_seconds_ = 0;  // of all units that have not begun
  double load_seconds_ = 0;
  std::int64_t turns_ = 0;  // released jobs, for kRoundRobin
};

}  // namespace hydra
