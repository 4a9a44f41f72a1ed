#include "csrc/plan/checkpoint_chain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "csrc/plan/chain.h"
#include "csrc/plan/recursion_search.h"

namespace hydra {
namespace {

using Kind = CheckpointStep::Kind;

CheckpointChain random_chain(std::mt19937& draw, int stages, Bytes largest) {
  const auto bytes = [&] { return static_cast<Bytes>(draw()) % largest + 1; };
  const auto time = [&] { return static_cast<double>(draw() % 9 + 1); };
  CheckpointChain chain = {bytes(), {}};
  for (int i = 0; i < stages; ++i) {
    const Bytes output = bytes();
    chain.stages.push_back({time(), time(), output, output + 3 * bytes(), bytes(), bytes()});
  }
  return chain;
}

Bytes below(std::mt19937& draw, Bytes end) { return static_cast<Bytes>(draw()) % end; }

/// A graph of chosen values: each state has some choices among earlier states.
struct RandomGraph {
  std::vector<std::vector<RecursionChoice>> states_;

  int states() const { return static_cast<int>(states_.size()); }
  int choices(int state) const { return static_cast<int>(states_[static_cast<std::size_t>(state)].size()); }
  RecursionChoice choice(int state, int index) const {
    return states_[static_cast<std::size_t>(state)][static_cast<std::size_t>(index)];
  }

  double value(int state, Bytes memory) const {
    double best = std::numeric_limits<double>::infinity();
    for (const RecursionChoice& choice : states_[static_cast<std::size_t>(state)]) {
      if (choice.needed <= memory) {
        const double first = choice.first < 0 ? 0 : value(choice.first, memory - choice.held);
        best = std::min(best, choice.cost + first + (choice.second < 0 ? 0 : value(choice.second, memory)));
      }
    }
    return best;
  }
};

RandomGraph random_graph(std::mt19937& draw) {
  RandomGraph graph;
  for (int state = 0; state < 7; ++state) {
    auto& choices = graph.states_.emplace_back();
    for (int i = 0; i < 3; ++i) {
      RecursionChoice choice;
      choice.cost = static_cast<double>(below(draw, 20));
      choice.needed = below(draw, 400);
      choice.first = static_cast<int>(below(draw, state + 1)) - 1;
      choice.held = below(draw, 300);
      choice.second = static_cast<int>(below(draw, state + 1)) - 1;
      choices.push_back(choice);
    }
  }
  return graph;
}

TEST(RecursionSearch, FindsTheValueWithAnyGrid) {
  std::mt19937 draw(1);
  int possible = 0;
  for (int round = 0; round < 400; ++round) {
    const RandomGraph graph = random_graph(draw);
    const Bytes memory = below(draw, 1500);
    const double value = graph.value(6, memory);
    for (const int cells : {1, 3, 40, 5000}) {
      const RecursionSearch<RandomGraph> search(graph, memory, {cells, 1'000'000});
      ASSERT_EQ(search.possible(), value < std::numeric_limits<double>::infinity()) << round;
      if (search.possible()) {
        ASSERT_EQ(search.value(), value) << round << " with " << cells;
        ASSERT_EQ(search.bound(), value) << round << " with " << cells;
        ++possible;
      }
    }
  }
  EXPECT_GT(possible, 400);
}

TEST(RecursionSearch, WithoutWorkThereAreStillASolutionAndABound) {
  std::mt19937 draw(2);
  int open = 0;
  for (int round = 0; round < 200; ++round) {
    const RandomGraph graph = random_graph(draw);
    const Bytes memory = below(draw, 1500);
    const double value = graph.value(6, memory);
    const RecursionSearch<RandomGraph> search(graph, memory, {3, 5 * (round % 4)});
    if (search.possible()) {
      ASSERT_LE(search.bound(), value) << round;
      ASSERT_GE(search.value(), value) << round;
      ASSERT_LT(search.value(), std::numeric_limits<double>::infinity()) << round;
      open += search.bound() < search.value() ? 1 : 0;
    }
  }
  EXPECT_GT(open, 5);
}

TEST(CheckpointChain, EnoughMemoryKeepsEverything) {
  const CheckpointChain chain = {1, {{1, 2, 1, 2, 0, 0}, {1, 2, 1, 2, 0, 0}}};
  for (const CheckpointClass type : {CheckpointClass::kPersistent, CheckpointClass::kFlat}) {
    const auto plan = plan_checkpoints(chain, 1 + 2 + 2 + 1 + 1, type);
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->time, 6);
    EXPECT_EQ(plan->bound, 6);
    EXPECT_EQ(plan->steps,
              (std::vector<CheckpointStep>{
                  {Kind::kForwardSaving, 0}, {Kind::kForwardSaving, 1}, {Kind::kBackward, 1}, {Kind::kBackward, 0}}));
  }
}

TEST(CheckpointChain, LessMemoryRunsAStageAgain) {
  const CheckpointChain chain = {1, {{1, 2, 1, 2, 0, 0}, {1, 2, 1, 2, 0, 0}}};
  for (const CheckpointClass type : {CheckpointClass::kPersistent, CheckpointClass::kFlat}) {
    const auto plan = plan_checkpoints(chain, 1 + 1 + 2 + 1 + 1, type);
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->time, 7);
    EXPECT_EQ(plan->steps, (std::vector<CheckpointStep>{{Kind::kForward, 0},
                                                        {Kind::kForwardSaving, 1},
                                                        {Kind::kBackward, 1},
                                                        {Kind::kDrop, 1},
                                                        {Kind::kForwardSaving, 0},
                                                        {Kind::kBackward, 0}}));
    EXPECT_FALSE(plan_checkpoints(chain, 5, type));
    EXPECT_FALSE(plan_checkpoints(chain, 0, type));
  }
}

TEST(CheckpointChain, FlatSchedulesAreAmongThePersistentOnes) {
  std::mt19937 draw(3);
  int faster = 0;
  for (int round = 0; round < 60; ++round) {
    const CheckpointChain chain = random_chain(draw, 12, 1'000'000'000);
    Bytes memory = 0;
    for (const CheckpointStage& stage : chain.stages) {
      memory += stage.saved_bytes / 2;
    }
    const auto persistent = plan_checkpoints(chain, memory, CheckpointClass::kPersistent);
    const auto flat = plan_checkpoints(chain, memory, CheckpointClass::kFlat);
    if (flat) {
      ASSERT_TRUE(persistent);
      EXPECT_LE(persistent->time, flat->time);
      faster += persistent->time < flat->time ? 1 : 0;
    }
  }
  EXPECT_GT(faster, 5);
}

TEST(CheckpointChain, UnitsDoNotMatter) {
  std::mt19937 draw(4);
  CheckpointChain chain = random_chain(draw, 10, 50);
  const auto plan = plan_checkpoints(chain, 600, CheckpointClass::kPersistent);
  ASSERT_TRUE(plan);
  constexpr Bytes kUnit = 1'000'003;
  chain.input_bytes *= kUnit;
  for (CheckpointStage& stage : chain.stages) {
    stage.output_bytes *= kUnit;
    stage.saved_bytes *= kUnit;
    stage.forward_transient_bytes *= kUnit;
    stage.backward_transient_bytes *= kUnit;
  }
  EXPECT_EQ(plan_checkpoints(chain, 601 * kUnit - 1, CheckpointClass::kPersistent)->steps, plan->steps);
}

TEST(CheckpointChain, SenselessInputIsRefused) {
  const CheckpointChain good = {1, {{1, 1, 1, 1, 1, 1}}};
  EXPECT_THROW(plan_checkpoints({}, 1, CheckpointClass::kFlat), PlanError);
  EXPECT_THROW(plan_checkpoints(good, -1, CheckpointClass::kFlat), PlanError);
  CheckpointChain chain = good;
  chain.stages[0].forward_time = -1;
  EXPECT_THROW(plan_checkpoints(chain, 1, CheckpointClass::kFlat), PlanError);
  chain.stages[0].forward_time = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(plan_checkpoints(chain, 1, CheckpointClass::kFlat), PlanError);
  chain = good;
  chain.stages[0].saved_bytes = -1;
  EXPECT_THROW(plan_checkpoints(chain, 1, CheckpointClass::kFlat), PlanError);
  chain.stages[0].saved_bytes = std::numeric_limits<Bytes>::max();
  EXPECT_THROW(plan_checkpoints(chain, 1, CheckpointClass::kFlat), PlanError);
  chain.stages.assign(1001, good.stages[0]);
  EXPECT_THROW(plan_checkpoints(chain, 1, CheckpointClass::kPersistent), PlanError);
}

}  // namespace
}  // namespace hydra
