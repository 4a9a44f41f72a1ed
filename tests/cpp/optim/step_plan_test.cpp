#include "csrc/optim/step_plan.h"

#include <gtest/gtest.h>

#include "csrc/base/errors.h"
#include "tests/cpp/optim/support.h"

namespace hydra {
namespace {

using test::Content;
using test::Kind;
using test::Memory;

Kind kind_named(const std::string& name) {
  for (Kind& kind : test::all_kinds()) {
    if (kind.name == name) {
      return kind;
    }
  }
  throw StateError(name);
}

constexpr std::int64_t kLong = 3 * (1 << 16) + 11;

struct Parameters {
  Memory large{kind_named("adamw2110"), kLong, 1, Content::kNumbers, 1};
  Memory empty{kind_named("sgd0000"), 0, 1, Content::kNumbers, 2};
  Memory small{kind_named("sgd0000"), 100, 1, Content::kNumbers, 3};

  StepPlan plan() {
    StepPlan made;
    made.add(large.update());
    made.add(empty.update());
    made.add(small.update());
    return made;
  }

  std::int64_t differences(const Parameters& other) const {
    return large.differences(other.large) + small.differences(other.small);
  }
};

TEST(StepPlan, RunsEveryParameterWholeWithAnyThreads) {
  Parameters wanted;
  for (Memory* memory : {&wanted.large, &wanted.small}) {
    const ParameterUpdate update = memory->update();
    run_update(update, 0, update.count, 0.5F);
  }
  EXPECT_GT(wanted.differences(Parameters{}), kLong);
  for (const int threads : {1, 2, 4}) {
    Parameters parameters;
    ThreadPool pool(threads);
    parameters.plan().run(pool, 0.5F);
    EXPECT_EQ(parameters.differences(wanted), 0) << threads << " threads";
  }
}

TEST(StepPlan, WeightsThatOverlapAreUpdatedInTheOrderInWhichTheyWereAdded) {
  const Kind kind = kind_named("adamw0000");
  const auto run = [&](int threads) {
    std::vector<Memory> memory;
    memory.reserve(3);
    for (std::uint32_t seed = 1; seed <= 3; ++seed) {
      memory.emplace_back(kind, kLong, 1, Content::kNumbers, seed);
    }
    StepPlan plan;
    for (Memory& one : memory) {
      ParameterUpdate update = one.update();
      update.weights = memory.front().update().weights;
      plan.add(update);
      if (threads == 0) {
        run_update(update, 0, update.count, 0.5F);
      }
    }
    if (threads > 0) {
      ThreadPool pool(threads);
      plan.run(pool, 0.5F);
    }
    return memory;
  };
  const std::vector<Memory> wanted = run(0);
  for (int round = 0; round < 20; ++round) {
    const std::vector<Memory> seen = run(4);
    for (std::size_t i = 0; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i].differences(wanted[i]), 0);
    }
  }
}

TEST(StepPlan, InRangesIsTheSameAsWhole) {
  Parameters wanted;
  ThreadPool pool(1);
  wanted.plan().run(pool, 0.5F);
  Parameters parameters;
  StepPlan plan = parameters.plan();
  StepPlan moved = std::move(plan);
  moved.run_range(2, 0, 100, 0.5F);
  for (std::int64_t begin = 0; begin < kLong; begin += 9999) {
    moved.run_range(0, begin, std::min(kLong, begin + 9999), 0.5F);
  }
  EXPECT_EQ(parameters.differences(wanted), 0);
}

TEST(StepPlan, RefusesRangesThatAreNotThere) {
  Parameters parameters;
  StepPlan plan = parameters.plan();
  EXPECT_THROW(plan.run_range(3, 0, 0, 1.0F), StateError);
  EXPECT_THROW(plan.run_range(2, -1, 5, 1.0F), StateError);
  EXPECT_THROW(plan.run_range(2, 5, 4, 1.0F), StateError);
  EXPECT_THROW(plan.run_range(2, 0, 101, 1.0F), StateError);
  EXPECT_EQ(parameters.differences(Parameters{}), 0);
}

TEST(StepPlan, RefusesAnUpdateThatLacksAnArrayOrHasOneTooMany) {
  Parameters parameters;
  StepPlan plan;
  const auto expect_refused = [&](const ParameterUpdate& whole, auto&& spoil) {
    ParameterUpdate update = whole;
    spoil(update);
    EXPECT_THROW(plan.add(update), StateError);
  };
  const ParameterUpdate split = parameters.large.update();
  expect_refused(split, [](ParameterUpdate& update) { update.weights = nullptr; });
  expect_refused(split, [](ParameterUpdate& update) { update.gradient = nullptr; });
  expect_refused(split, [](ParameterUpdate& update) { update.master = nullptr; });
  expect_refused(split, [](ParameterUpdate& update) { update.first_moment = nullptr; });
  expect_refused(split, [](ParameterUpdate& update) { update.second_moment = nullptr; });
  expect_refused(split, [](ParameterUpdate& update) { update.weight_format = NumberFormat::kFloat16; });
  expect_refused(split, [](ParameterUpdate& update) { update.moment_format = NumberFormat::kFloat16; });
  const ParameterUpdate plain = parameters.small.update();
  expect_refused(plain, [](ParameterUpdate& update) { update.master = update.weights; });
  expect_refused(plain, [](ParameterUpdate& update) { update.second_moment = update.weights; });
  expect_refused(plain, [](ParameterUpdate& update) { update.weight_format = NumberFormat::kBfloat16; });
  expect_refused(plain, [](ParameterUpdate& update) { update.new_weights = update.weights; });
  EXPECT_EQ(plan.size(), 0U);
}

TEST(StepPlan, KnowsTheBytesItReadsAndWrites) {
  const auto bytes_each = [](const std::string& name) {
    Memory memory(kind_named(name), 1000, 0, Content::kNumbers, 1);
    StepPlan plan;
    plan.add(memory.update());
    plan.add(memory.update());
    return static_cast<double>(plan.traffic_bytes()) / 2000.0;
  };
  EXPECT_EQ(StepPlan{}.traffic_bytes(), 0);
  EXPECT_EQ(bytes_each("adamw0000"), 4 + 4 + 4 + 16);  // weights read and written, gradient, two moments likewise
  EXPECT_EQ(bytes_each("adamw1110"), 2 + 8 + 2 + 16);  // weights written, fp32 master
  EXPECT_EQ(bytes_each("adamw2110"), 4 + 4 + 2 + 16);  // split master
  EXPECT_EQ(bytes_each("adamw2111"), 4 + 4 + 2 + 8);   // bf16 moments
  EXPECT_EQ(bytes_each("sgd0000"), 8 + 4 + 8);         // one moment
  EXPECT_EQ(bytes_each("plain0000"), 8 + 4);           // none
}

TEST(RoundingSeed, DiffersBetweenNeighbours) {
  EXPECT_NE(rounding_seed(1, 0), rounding_seed(2, 0));
  EXPECT_NE(rounding_seed(1, 0), rounding_seed(1, 1));
  EXPECT_NE(rounding_seed(1, 0), rounding_seed(0, 1));
}

}  // namespace
}  // namespace hydra
