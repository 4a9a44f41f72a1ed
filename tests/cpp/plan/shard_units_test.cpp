#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "csrc/plan/chain.h"
#include "csrc/plan/units/ready_jobs.h"
#include "csrc/plan/units/unit_batch.h"
#include "csrc/plan/units/unit_bound.h"
#include "csrc/plan/units/unit_chain.h"
#include "csrc/plan/units/unit_scheduler.h"
#include "csrc/plan/units/unit_simulation.h"

namespace hydra {
namespace {

constexpr std::array kPolicies = {UnitPolicy::kLongest, UnitPolicy::kLongestResident, UnitPolicy::kRoundRobin,
                                  UnitPolicy::kRandom, UnitPolicy::kShortest};

std::vector<UnitChain> chains_of(const UnitBatch& batch) {
  std::vector<UnitChain> chains;
  for (const UnitJob& job : batch.jobs) {
    chains.emplace_back(job, batch.link);
  }
  return chains;
}

double bound_of(const UnitBatch& batch) { return units_bound(chains_of(batch), batch.devices); }

/// Whole seconds, so that sums are exact.
UnitBatch random_batch(unsigned seed, std::int64_t devices, std::size_t jobs, unsigned units, bool has_link) {
  std::mt19937 random(seed);
  const auto draw = [&](unsigned most) { return 1 + static_cast<std::uint32_t>(random()) % most; };
  UnitBatch batch{devices, has_link ? std::optional(1.0) : std::nullopt, {}};
  for (std::size_t i = 0; i < jobs; ++i) {
    UnitJob job{"job" + std::to_string(i), {}, draw(2)};
    for (unsigned unit = draw(units); unit > 0; --unit) {
      job.units.push_back({static_cast<double>(draw(9)), draw(2), static_cast<double>(random() % 8)});
    }
    batch.jobs.push_back(job);
  }
  return batch;
}

/// The shortest makespan of all orders and devices. Loads of a device follow each other, and may begin at any time.
class AllSchedules {
 public:
  explicit AllSchedules(const UnitBatch& batch)
      : chains_(chains_of(batch)),
        jobs_(chains_.size()),
        devices_(static_cast<std::size_t>(batch.devices)),
        has_link_(batch.link.has_value()) {}

  double shortest() {
    visit(0);
    return best_;
  }

 private:
  struct Job {
    std::int64_t begun = 0;
    double end = 0;
    std::optional<std::size_t> device;
  };

  struct Device {
    double end = 0;
    double link = 0;
    std::optional<std::size_t> job;
  };

  void visit(double makespan) {
    if (makespan >= best_) {
      return;
    }
    bool is_done = true;
    for (std::size_t job = 0; job < jobs_.size(); ++job) {
      if (jobs_[job].begun == chains_[job].length()) {
        continue;
      }
      is_done = false;
      for (std::size_t device = 0; device < devices_.size(); ++device) {
        place(job, device, makespan);
        if (!has_link_ && devices_[device].end == 0 && jobs_[job].begun == 0) {
          break;  // devices that have run nothing are alike
        }
      }
    }
    best_ = is_done ? makespan : best_;
  }

  void place(std::size_t job, std::size_t device, double makespan) {
    const Job job_before = jobs_[job];
    const Device device_before = devices_[device];
    const UnitChain& chain = chains_[job];
    Device& on = devices_[device];
    const bool is_there = on.job == job && jobs_[job].device == device && chain.continues(jobs_[job].begun);
    on.link += is_there ? 0 : chain.load_seconds(jobs_[job].begun);
    const double begin = std::max({on.end, jobs_[job].end, is_there ? 0 : on.link});
    on.end = begin + chain.seconds(jobs_[job].begun);
    on.job = job;
    jobs_[job] = {jobs_[job].begun + 1, on.end, device};
    visit(std::max(makespan, on.end));
    jobs_[job] = job_before;
    devices_[device] = device_before;
  }

  std::vector<UnitChain> chains_;
  std::vector<Job> jobs_;
  std::vector<Device> devices_;
  bool has_link_;
  double best_ = std::numeric_limits<double>::infinity();
};

/// Each unit runs once, in its job's order, one of a job at a time, and one on a device at a time.
void expect_valid(const UnitBatch& batch, const UnitSchedule& schedule) {
  struct Run {
    std::int64_t first, last;
    double start, end;
  };
  const std::vector<UnitChain> chains = chains_of(batch);
  std::vector<std::vector<Run>> of_job(chains.size());
  double busy = 0;
  for (const std::vector<UnitRun>& runs : schedule.runs) {
    double free = 0;
    for (const UnitRun& run : runs) {
      EXPECT_GE(run.start, free);
      free = run.start;
      for (std::int64_t unit = run.first; unit <= run.last; ++unit) {
        free += chains[run.job].seconds(unit);
      }
      busy += free - run.start;
      of_job[run.job].push_back({run.first, run.last, run.start, free});
      EXPECT_LE(free, schedule.makespan);
    }
  }
  double work = 0;
  for (std::size_t job = 0; job < chains.size(); ++job) {
    std::sort(of_job[job].begin(), of_job[job].end(), [](const Run& a, const Run& b) { return a.first < b.first; });
    std::int64_t next = 0;
    double free = 0;
    for (const Run& run : of_job[job]) {
      EXPECT_EQ(run.first, next);
      EXPECT_GE(run.start, free);
      next = run.last + 1;
      free = run.end;
    }
    EXPECT_EQ(next, chains[job].length());
    work += chains[job].remaining(0);
  }
  EXPECT_EQ(busy, work);
}

TEST(UnitChain, HasHydrasFormulaForWhatRemains) {
  // 3 epochs of 4 minibatches with units of 1, 2 and 4 seconds.
  const UnitChain chain({"a", {{1, 0, 0}, {2, 1, 0}, {4, 0, 0}}, 3 * 4}, std::nullopt);
  ASSERT_EQ(chain.length(), 36);
  double sum = 0;
  for (std::int64_t position = chain.length(); position-- > 0;) {
    sum += chain.seconds(position);
    const std::int64_t minibatch = position / 3;
    const double e = static_cast<double>(3 - minibatch / 4);
    const double c = static_cast<double>(4 - minibatch % 4);
    const double r = std::array{7.0, 6.0, 4.0}[static_cast<std::size_t>(position % 3)];
    EXPECT_EQ(chain.remaining(position), ((e - 1) * 4 + c - 1) * 7 + r);
    EXPECT_EQ(chain.remaining(position), sum);
  }
  EXPECT_EQ(chain.remaining(chain.length()), 0);
}

TEST(UnitChain, CountsRunsOfAShardOverRepeats) {
  const UnitJob job{"a", {{1, 7, 10}, {2, 7, 20}, {3, 8, 40}, {1, 7, 80}}, 3};
  const UnitChain chain(job, 10.0);
  EXPECT_EQ(chain.run_end(0), 2);
  EXPECT_EQ(chain.run_end(1), 2);
  EXPECT_EQ(chain.run_end(2), 3);
  EXPECT_EQ(chain.run_end(3), 6);  // with the first two units of the next repeat
  EXPECT_EQ(chain.run_end(11), 12);
  EXPECT_TRUE(chain.continues(4));
  EXPECT_FALSE(chain.continues(0));
  // The first units' load, then shards 8 and 7 of each repeat.
  EXPECT_EQ(chain.least_loads(), 1 + 3 * (4 + 8));
  EXPECT_EQ(chain.least_first(), 1);
  const UnitChain one({"b", {{1, 7, 10}, {2, 7, 20}}, 5}, 10.0);
  EXPECT_EQ(one.run_end(3), 10);
  EXPECT_EQ(one.least_loads(), 1);
}

TEST(UnitBound, IsAtMostTheShortestOfAllSchedules) {
  int met = 0;
  for (unsigned seed = 0; seed < 120; ++seed) {
    const bool has_link = seed % 3 != 0;
    const UnitBatch batch = random_batch(seed, 1 + seed % 2, 2 + seed % 2, 2, has_link);
    const double shortest = AllSchedules(batch).shortest();
    const double bound = bound_of(batch);
    EXPECT_LE(bound, shortest) << seed;
    met += bound == shortest ? 1 : 0;
    for (const UnitPolicy policy : kPolicies) {
      EXPECT_GE(simulate_units(batch, policy).makespan, shortest) << seed;
    }
  }
  EXPECT_GE(met, 40);
}

TEST(UnitBound, OfOneDeviceJoinsComputeAndLoads) {
  const UnitBatch compute{1, 1.0, {{"a", {{5, 0, 2}, {5, 1, 3}}, 1}, {"b", {{5, 0, 1}}, 1}}};
  EXPECT_EQ(bound_of(compute), 15 + 1);
  const UnitBatch loads{1, 0.1, {{"a", {{5, 0, 2}, {5, 1, 3}}, 1}, {"b", {{4, 0, 1}}, 1}}};
  EXPECT_EQ(bound_of(loads), 60 + 4);
}

TEST(UnitBound, OfSeveralDevicesHasTheirLinksToo) {
  const UnitBatch batch{2, 0.1, {{"a", {{5, 0, 2}, {5, 1, 3}}, 1}, {"b", {{4, 0, 1}, {4, 1, 2}}, 1}}};
  EXPECT_EQ(bound_of(batch), (20 + 30 + 10 + 20) / 2.0);
}

TEST(UnitSimulation, SchedulesRunEveryUnitOnceInItsJobsOrder) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const UnitBatch batch = random_batch(seed, 1 + seed % 4, 1 + seed % 7, 6, seed % 2 == 0);
    for (const UnitPolicy policy : kPolicies) {
      const UnitSchedule schedule = simulate_units(batch, policy, seed);
      expect_valid(batch, schedule);
      EXPECT_LE(schedule.bound, schedule.makespan);
      EXPECT_GE(schedule.bound, bound_of(batch) * (1 - 1e-12));
      double least = 0;
      for (const UnitChain& chain : chains_of(batch)) {
        least += chain.least_loads();
      }
      EXPECT_GE(schedule.load_seconds, least);
    }
  }
}

TEST(UnitSimulation, LongestIsTheBestOfAllSchedulesForEqualUnits) {
  // Hu's level algorithm: the longest chains first is optimal if all units take the same time.
  for (unsigned seed = 0; seed < 40; ++seed) {
    UnitBatch batch = random_batch(seed, 2, 3, 3, false);
    for (UnitJob& job : batch.jobs) {
      job.repeats = 1;
      for (ShardUnit& unit : job.units) {
        unit.seconds = 2;
      }
    }
    EXPECT_EQ(simulate_units(batch, UnitPolicy::kLongest).makespan, AllSchedules(batch).shortest()) << seed;
  }
}

TEST(UnitSimulation, LongestEndsWithinAUnitOfTheBound) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    const UnitBatch batch = random_batch(seed, 1 + seed % 5, 2 + seed % 9, 8, false);
    double longest = 0;
    for (const UnitJob& job : batch.jobs) {
      for (const ShardUnit& unit : job.units) {
        longest = std::max(longest, unit.seconds);
      }
    }
    EXPECT_LE(simulate_units(batch, UnitPolicy::kLongest).makespan, bound_of(batch) + longest) << seed;
  }
}

TEST(UnitSimulation, ALoadIsHiddenBehindTheUnitBefore) {
  // a: load 2, then 5 s; b: load 3 meanwhile, then 1 s; a's next shard loads for 4 s, 3 of which nothing hides.
  const UnitBatch batch{1, 1.0, {{"a", {{5, 0, 2}, {1, 1, 4}}, 1}, {"b", {{4, 0, 3}}, 1}}};
  const UnitSchedule schedule = simulate_units(batch, UnitPolicy::kLongest);
  ASSERT_EQ(schedule.runs[0].size(), 3U);
  EXPECT_EQ(schedule.runs[0][0].start, 2);
  EXPECT_EQ(schedule.runs[0][1].job, 1U);
  EXPECT_EQ(schedule.runs[0][1].start, 7);
  EXPECT_EQ(schedule.runs[0][2].start, 11);
  EXPECT_EQ(schedule.makespan, 12);
  EXPECT_EQ(schedule.load_seconds, 9);
  EXPECT_EQ(schedule.stalled_seconds, 2);
}

TEST(UnitSimulation, StayingWithAShardLoadsItOnce) {
  // Four microbatches on each of two shards; a load takes 3 s, a unit 1 s.
  const UnitJob job{"a", {{1, 0, 3}, {1, 0, 3}, {1, 0, 3}, {1, 0, 3}, {1, 1, 3}, {1, 1, 3}, {1, 1, 3}, {1, 1, 3}}, 1};
  const UnitBatch batch{1, 1.0, {job, job}};
  const UnitSchedule stays = simulate_units(batch, UnitPolicy::kLongestResident);
  EXPECT_EQ(stays.makespan, bound_of(batch));
  EXPECT_EQ(stays.load_seconds, 4 * 3);
  const UnitSchedule alternates = simulate_units(batch, UnitPolicy::kLongest);
  EXPECT_GT(alternates.makespan, 2 * stays.makespan);
}

TEST(UnitSimulation, ACriticalJobIsNotLeftForTheResidentShard) {
  // Three jobs of one shard each on two devices: 15 s are needed, and 20 s pass if two of them run to their ends.
  const UnitJob job{"a", {{1, 0, 0.01}}, 10};
  const UnitBatch batch{2, 1.0, {job, job, job}};
  const UnitSchedule schedule = simulate_units(batch, UnitPolicy::kLongestResident);
  EXPECT_LT(schedule.makespan, 16.2);
  EXPECT_LT(schedule.load_seconds, simulate_units(batch, UnitPolicy::kLongest).load_seconds);
}

TEST(UnitSimulation, WithoutALinkStayingChangesNothing) {
  const UnitBatch batch = random_batch(5, 3, 7, 8, false);
  EXPECT_EQ(simulate_units(batch, UnitPolicy::kLongest).makespan,
            simulate_units(batch, UnitPolicy::kLongestResident).makespan);
}

TEST(UnitSimulation, IsTheSameForTheSameSeed) {
  const UnitBatch batch = random_batch(3, 2, 9, 8, true);
  const UnitSchedule one = simulate_units(batch, UnitPolicy::kRandom, 4);
  const UnitSchedule same = simulate_units(batch, UnitPolicy::kRandom, 4);
  const UnitSchedule other = simulate_units(batch, UnitPolicy::kRandom, 5);
  ASSERT_EQ(one.runs[0].size(), same.runs[0].size());
  for (std::size_t i = 0; i < one.runs[0].size(); ++i) {
    EXPECT_EQ(one.runs[0][i].job, same.runs[0][i].job);
    EXPECT_EQ(one.runs[0][i].start, same.runs[0][i].start);
  }
  EXPECT_NE(one.stalled_seconds, other.stalled_seconds);
}

TEST(UnitSimulation, OfNoJobsTakesNoTime) {
  const UnitSchedule schedule = simulate_units({2, std::nullopt, {}}, UnitPolicy::kLongest);
  EXPECT_EQ(schedule.makespan, 0);
  EXPECT_EQ(schedule.bound, 0);
  EXPECT_EQ(schedule.units, 0);
}

TEST(UnitScheduler, TakesTurns) {
  const UnitJob job{"a", {{1, 0, 0}}, 2};
  UnitScheduler scheduler({1, std::nullopt, {job, job, job}}, UnitPolicy::kRoundRobin);
  std::vector<std::size_t> order;
  for (double now = 0; const std::optional<UnitTurn> turn = scheduler.next(0, now); ++now) {
    order.push_back(turn->job);
    scheduler.finished(0);
  }
  EXPECT_EQ(order, (std::vector<std::size_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(scheduler.units_left(), 0);
}

TEST(UnitScheduler, NeedsNoForeseenTimes) {
  // Units take three times what was foreseen. The longest job that is left has the next turn all the same.
  UnitScheduler scheduler({1, std::nullopt, {{"a", {{4, 0, 0}}, 2}, {"b", {{3, 0, 0}}, 2}}}, UnitPolicy::kLongest);
  EXPECT_EQ(scheduler.next(0, 0)->job, 0U);
  EXPECT_EQ(scheduler.remaining(0), 4);
  EXPECT_FALSE(scheduler.ahead(0, 0).has_value());
  scheduler.finished(0);
  EXPECT_EQ(scheduler.next(0, 12)->job, 1U);
}

TEST(UnitScheduler, ADeviceWithNothingElseTakesWhatAnotherWasPromised) {
  const UnitJob job{"a", {{8, 0, 2}}, 1};
  UnitScheduler scheduler({2, 1.0, {job, job, job}}, UnitPolicy::kRoundRobin);
  ASSERT_EQ(scheduler.next(0, 0)->job, 0U);
  ASSERT_EQ(scheduler.next(1, 0)->job, 1U);
  EXPECT_EQ(scheduler.ahead(0, 2), 2U);
  EXPECT_EQ(scheduler.ahead(1, 2), std::nullopt);
  scheduler.finished(1);
  const std::optional<UnitTurn> taken = scheduler.next(1, 10);
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->job, 2U);
  EXPECT_EQ(taken->begin, 12);  // its shard is on the other device
  scheduler.finished(0);
  EXPECT_FALSE(scheduler.next(0, 10).has_value());
}

TEST(UnitScheduler, LoadsOfADeviceFollowEachOther) {
  const UnitBatch batch{2, 1.0, {{"a", {{4, 0, 0}, {4, 1, 5}}, 1}, {"b", {{4, 0, 0}}, 1}, {"c", {{4, 0, 10}}, 1}}};
  UnitScheduler scheduler(batch, UnitPolicy::kRoundRobin);
  ASSERT_EQ(scheduler.next(0, 0)->job, 0U);
  ASSERT_EQ(scheduler.next(1, 0)->job, 1U);
  ASSERT_EQ(scheduler.ahead(0, 0), 2U);  // until 10
  scheduler.finished(1);
  ASSERT_EQ(scheduler.next(1, 4)->job, 2U);
  scheduler.finished(0);
  EXPECT_EQ(scheduler.next(0, 4)->begin, 15);
  EXPECT_EQ(scheduler.load_seconds(), 10 + 10 + 5);
}

TEST(UnitScheduler, AShardThatWasUsedElsewhereIsLoadedAgain) {
  UnitScheduler scheduler({2, 1.0, {{"a", {{4, 0, 3}}, 4}}}, UnitPolicy::kLongest);
  ASSERT_EQ(scheduler.next(0, 0)->begin, 3);
  scheduler.finished(0);
  ASSERT_EQ(scheduler.next(1, 10)->begin, 13);
  scheduler.finished(1);
  EXPECT_EQ(scheduler.next(0, 20)->begin, 23);
  scheduler.finished(0);
  EXPECT_EQ(scheduler.next(0, 30)->begin, 30);
}

TEST(UnitScheduler, SaysWhichCallIsMissing) {
  UnitScheduler scheduler({1, std::nullopt, {{"a", {{1, 0, 0}}, 1}}}, UnitPolicy::kLongest);
  EXPECT_THROW(scheduler.finished(0), PlanError);
  EXPECT_THROW(scheduler.ahead(0, 0), PlanError);
  scheduler.next(0, 0);
  EXPECT_THROW(scheduler.next(0, 0), PlanError);
  EXPECT_THROW(scheduler.next(1, 0), PlanError);
  EXPECT_THROW(scheduler.remaining(1), PlanError);
}

TEST(ReadyJobs, DrawEveryJobEquallyOften) {
  ReadyJobs ready(UnitPolicy::kRandom, 1);
  std::array<int, 4> drawn = {};
  for (std::size_t job = 0; job < 3; ++job) {
    ready.insert({0, job});
  }
  for (int i = 0; i < 4000; ++i) {
    if (ready.is_first({0, 3})) {
      ++drawn[3];
      continue;
    }
    const ReadyJob job = ready.take();
    ++drawn[job.job];
    ready.insert(job);
  }
  for (const int times : drawn) {
    EXPECT_NEAR(times, 1000, 120);  // four standard deviations
  }
}

TEST(UnitBatch, RefusesNumbersThatMakeNoSense) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kMost = std::numeric_limits<double>::max();
  const UnitJob good{"a", {{1, 0, 0}}, 1};
  check_units({1, 1.0, {good}});
  for (const UnitBatch& batch : {
           UnitBatch{0, std::nullopt, {good}},
           UnitBatch{1, 0.0, {good}},
           UnitBatch{1, kNaN, {good}},
           UnitBatch{1, std::nullopt, {{"a", {}, 1}}},
           UnitBatch{1, std::nullopt, {{"a", {{1, 0, 0}}, 0}}},
           UnitBatch{1, std::nullopt, {{"a", {{-1, 0, 0}}, 1}}},
           UnitBatch{1, std::nullopt, {{"a", {{1, 0, kNaN}}, 1}}},
           UnitBatch{1, std::nullopt, {{"a", {{kMost, 0, 0}}, 2}}},
           UnitBatch{1, std::nullopt, {{"a", {{1, 0, 0}}, std::numeric_limits<std::int64_t>::max()}}},
           UnitBatch{1, std::nullopt, {good, {"a", {{1, 0, 0}}, 100'000'000}}},
       }) {
    EXPECT_THROW(check_units(batch), PlanError);
  }
}

}  // namespace
}  // namespace hydra
