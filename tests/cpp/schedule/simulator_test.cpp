#include "csrc/schedule/simulator.h"

#include <gtest/gtest.h>

#include "csrc/base/errors.h"
#include "tests/cpp/schedule/support.h"

namespace hydra::schedule {
namespace {

using test::made;
using test::message_of;

constexpr double kForward = 0.3;
constexpr double kBackward = 0.7;

Costs costs_of(const Schedule& schedule) {
  const std::size_t stages = index(schedule.stages());
  Costs costs;
  costs.forward.assign(stages, kForward);
  costs.backward.assign(stages, kBackward);
  costs.update.assign(stages, 0);
  costs.reduce.assign(stages, 0);
  costs.transfer.assign(stages - 1, 0);
  costs.latency.assign(stages - 1, 0);
  return costs;
}

TEST(Simulator, GivesTheTimeOfAFlushAndOfTwoVersions) {
  for (const int depth : {1, 2, 4, 8}) {
    for (const int microbatches : {7, 8, 32}) {
      for (const char* kind : {"gpipe", "1f1b"}) {
        const Schedule flush = made(kind, depth, depth, microbatches);
        EXPECT_NEAR(simulate(flush, costs_of(flush), 4).period, microbatches + depth - 1, 1e-9);
      }
      const Schedule two = made("2bw", depth, depth, microbatches);
      EXPECT_NEAR(simulate(two, costs_of(two), 8).period, microbatches, 1e-9);
    }
  }
}

TEST(Simulator, HidesAReductionUpToTheSlack) {
  const Schedule schedule = made("2bw", 4, 4, 8);
  Costs costs = costs_of(schedule);
  costs.reduce[0] = 8 - 4 + 1;
  EXPECT_NEAR(simulate(schedule, costs, 12).period, 8, 1e-9);
  costs.reduce[0] += 0.25;
  EXPECT_NEAR(simulate(schedule, costs, 12).period, 8.25, 1e-9);
}

TEST(Simulator, GivesAnyActionItsTime) {
  const Schedule schedule = made("gpipe", 2, 2, 1);
  Costs costs = costs_of(schedule);
  costs.transfer[0] = 10;
  costs.latency[0] = 5;
  costs.update[1] = 100;
  const Timeline timeline = simulate(schedule, costs, 1);
  std::vector<std::string> ends;
  for (const TimedAction& timed : timeline.actions) {
    if (is_compute(timed.action.kind) || timed.action.kind == ActionKind::kFinishUpdate) {
      ends.push_back(token(timed.action) + " " + std::to_string(timed.end));
    }
  }
  EXPECT_EQ(ends, (std::vector<std::string>{"F0.0 0.300000", "B0.0 32.000000", "U0 32.000000", "F1.0 15.600000",
                                            "B1.0 16.300000", "U1 116.300000"}));
  EXPECT_DOUBLE_EQ(timeline.makespan, 116.3);
  EXPECT_NEAR(timeline.busy[0], 1.0, 1e-9);
}

TEST(Simulator, RefusesCostsThatCannotBe) {
  const Schedule schedule = made("gpipe", 2, 2, 1);
  Costs costs = costs_of(schedule);
  costs.latency.push_back(0);
  EXPECT_EQ(message_of<InvalidSchedule>([&] { simulate(schedule, costs, 1); }),
            "latency: 2 costs; 1 are needed, one for every hop");
  EXPECT_NE(message_of<InvalidSchedule>([&] { simulate(schedule, costs_of(schedule), 0); }), "");
}

}  // namespace
}  // namespace hydra::schedule
