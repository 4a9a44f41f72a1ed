#include "csrc/plan/units/unit_scheduler.h"

#include <algorithm>
#include <string>

#include "csrc/plan/chain.h"

namespace hydra {

namespace {

constexpr double kRounding = 1e-9;  // relative, of sums

const UnitBatch& checked(const UnitBatch& batch) {
  check_units(batch);
  return batch;
}

}  // namespace

UnitScheduler::UnitScheduler(const UnitBatch& batch, UnitPolicy policy, std::uint64_t seed)
    : policy_(policy),
      has_link_(checked(batch).link.has_value()),
      jobs_(batch.jobs.size()),
      devices_(static_cast<std::size_t>(batch.devices)),
      ready_(policy, seed) {
  for (const UnitJob& job : batch.jobs) {
    chains_.emplace_back(job, batch.link);
    units_left_ += chains_.back().length();
    waiting_seconds_ += chains_.back().remaining(0);
    release(chains_.size() - 1);
  }
}

std::optional<UnitTurn> UnitScheduler::next(std::size_t device, double now) {
  Device& own = device_at(device, false);
  const std::optional<std::size_t> chosen = choose(device);
  if (!chosen) {
    return std::nullopt;
  }
  Job& job = jobs_[*chosen];
  const UnitChain& chain = chains_[*chosen];
  UnitTurn turn{*chosen, job.begun, now, now};
  if (own.ahead && own.ahead->entry.job == *chosen && !own.kept) {
    turn.begin = std::max(now, own.ahead->loaded);
  } else if (!is_resident(device, *chosen)) {
    turn.begin = load(own, *chosen, job.begun, now);
  }
  turn.end = turn.begin + chain.seconds(job.begun);
  if (own.kept && own.kept->job == *chosen) {
    own.kept.reset();  // a promise behind the resident shard's units stays
  } else {
    withdraw(*chosen);
  }
  job = {job.begun + 1, device, true};
  own.last_job = *chosen;
  own.is_running = true;
  waiting_seconds_ -= chain.seconds(turn.unit);
  return turn;
}

std::optional<std::size_t> UnitScheduler::ahead(std::size_t device, double now) {
  Device& own = device_at(device, true);
  if (!has_link_) {
    return std::nullopt;
  }
  if (!own.ahead) {
    own.ahead = promise(own, now);
  }
  return own.ahead ? std::optional(own.ahead->entry.job) : std::nullopt;
}

void UnitScheduler::finished(std::size_t device) {
  Device& own = device_at(device, true);
  const std::size_t job = *own.last_job;
  own.is_running = false;
  jobs_[job].is_running = false;
  --units_left_;
  if (jobs_[job].begun == chains_[job].length()) {
    return;
  }
  if (stays() && chains_[job].continues(jobs_[job].begun)) {
    own.kept = {rank(job, jobs_[job].begun), job};
  } else if (!own.ahead || own.ahead->entry.job != job) {
    release(job);
  }
}

double UnitScheduler::remaining(std::size_t job) const {
  HYDRA_EXPECT(job < jobs_.size(), PlanError,
               "there is no job " + std::to_string(job) + ": give a number below " + std::to_string(jobs_.size()));
  return chains_[job].remaining(jobs_[job].begun);
}

UnitScheduler::Device& UnitScheduler::device_at(std::size_t device, bool is_running) {
  HYDRA_EXPECT(
      device < devices_.size(), PlanError,
      "there is no device " + std::to_string(device) + ": give a number below " + std::to_string(devices_.size()));
  HYDRA_EXPECT(devices_[device].is_running == is_running, PlanError,
               "device " + std::to_string(device) +
                   (is_running ? " runs no unit: call next() first" : " runs a unit: call finished() first"));
  return devices_[device];
}

/// The job for a free device. It is no longer among the ready ones, and may still be promised.
std::optional<std::size_t> UnitScheduler::choose(std::size_t device) {
  Device& own = devices_[device];
  std::optional<ReadyJob> choice = own.kept;
  if (!choice && own.ahead) {
    choice = own.ahead->entry;
  }
  if (!choice) {
    choice = ready_.empty() ? longest_promised(device) : std::optional(ready_.take());
    return choice ? std::optional(choice->job) : std::nullopt;
  }
  const std::optional<ReadyJob> critical = critical_job(*choice);
  if (!critical) {
    return choice->job;
  }
  if (!ready_.empty() && ready_.first().job == critical->job) {
    ready_.take();
  }
  if (is_resident(device, choice->job)) {  // no longer
    withdraw(choice->job);
    release(choice->job);
  }
  return critical->job;
}

/// See [Note: critical jobs].
std::optional<ReadyJob> UnitScheduler::critical_job(const ReadyJob& choice) const {
  if (!is_longest_first()) {
    return std::nullopt;
  }
  std::optional<ReadyJob> longest = longest_promised(std::nullopt);
  if (!ready_.empty() && (!longest || ready_.first() < *longest)) {
    longest = ready_.first();
  }
  if (!longest || !(*longest < choice)) {
    return std::nullopt;
  }
  // What the choice's unit takes passes on all devices.
  const double mean = waiting_seconds_ / static_cast<double>(devices_.size());
  const double left = mean - chains_[choice.job].seconds(jobs_[choice.job].begun);
  const double remaining = -longest->rank;
  return remaining > left + kRounding * mean ? longest : std::nullopt;
}

/// The first eligible job that is promised to a device, but this one.
std::optional<ReadyJob> UnitScheduler::longest_promised(std::optional<std::size_t> but) const {
  std::optional<ReadyJob> first;
  const auto consider = [&](const ReadyJob& entry) {
    if (!jobs_[entry.job].is_running && (!first || entry < *first)) {
      first = entry;
    }
  };
  if (!has_link_) {
    return first;
  }
  for (std::size_t device = 0; device < devices_.size(); ++device) {
    if (device == but) {
      continue;
    }
    if (devices_[device].kept) {
      consider(*devices_[device].kept);
    }
    if (devices_[device].ahead &&
        (!devices_[device].kept || devices_[device].kept->job != devices_[device].ahead->entry.job)) {
      consider(devices_[device].ahead->entry);
    }
  }
  return first;
}

/// What a device loads while its unit runs: its own job's next shard, or another job's.
std::optional<UnitScheduler::Promise> UnitScheduler::promise(Device& device, double now) {
  const std::size_t own = *device.last_job;
  const UnitChain& chain = chains_[own];
  const std::int64_t after = stays() ? chain.run_end(jobs_[own].begun - 1) : jobs_[own].begun;
  if (after < chain.length() && ready_.is_first({rank(own, after), own})) {
    return Promise{{rank(own, after), own}, chain.continues(after) ? now : load(device, own, after, now)};
  }
  if (ready_.empty()) {
    return std::nullopt;
  }
  const ReadyJob other = ready_.take();
  return Promise{other, load(device, other.job, jobs_[other.job].begun, now)};
}

/// When a shard is there that the device's link loads from now on.
double UnitScheduler::load(Device& device, std::size_t job, std::int64_t position, double now) {
  const double seconds = chains_[job].load_seconds(position);
  if (seconds == 0) {
    return now;
  }
  load_seconds_ += seconds;
  device.link_free = std::max(now, device.link_free) + seconds;
  return device.link_free;
}

/// Ends all promises of a job.
void UnitScheduler::withdraw(std::size_t job) {
  if (!has_link_) {
    return;
  }
  for (Device& device : devices_) {
    if (device.kept && device.kept->job == job) {
      device.kept.reset();
    }
    if (device.ahead && device.ahead->entry.job == job) {
      device.ahead.reset();
    }
  }
}

void UnitScheduler::release(std::size_t job) {
  ready_.insert({rank(job, jobs_[job].begun), job});
  ++turns_;
}

bool UnitScheduler::is_resident(std::size_t device, std::size_t job) const {
  return devices_[device].last_job == job && jobs_[job].device == device && chains_[job].continues(jobs_[job].begun);
}

double UnitScheduler::rank(std::size_t job, std::int64_t position) const {
  switch (policy_) {
    case UnitPolicy::kLongest:
    case UnitPolicy::kLongestResident:
      return -chains_[job].remaining(position);
    case UnitPolicy::kShortest:
      return chains_[job].remaining(position);
    case UnitPolicy::kRoundRobin:
      return static_cast<double>(turns_);
    case UnitPolicy::kRandom:
      return 0;
  }
  return 0;
}

}  // namespace hydra
