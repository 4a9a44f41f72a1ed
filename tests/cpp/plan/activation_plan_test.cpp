#include "csrc/plan/activation_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "csrc/plan/chain.h"
#include "csrc/testing/activation_enumeration.h"

namespace hydra {
namespace {

using Option = ActivationOption;

constexpr double kNoActivationLimit = std::numeric_limits<double>::infinity();

class Chains {
 public:
  explicit Chains(unsigned seed) : generator_(seed) {}

  double between(double low, double high) { return std::uniform_real_distribution<double>(low, high)(generator_); }
  template <typename Value>
  Value one_of(std::initializer_list<Value> values) {
    return *(values.begin() + generator_() % values.size());
  }

  ActivationSegment segment(bool may_compress) {
    const auto mib = [&](double low, double high) { return static_cast<Bytes>(1'000'000 * between(low, high)); };
    ActivationSegment segment;
    segment.forward_seconds = one_of({1, 2, 3, 5}) * between(0.5, 1.5);
    segment.backward_seconds = 2 * segment.forward_seconds * between(0.8, 1.2);
    segment.saved.fresh = static_cast<Bytes>(1'000'000 * one_of({4, 8, 16, 32}) * between(0.5, 1.5));
    segment.saved.all = segment.saved.fresh + one_of({0, 1}) * mib(0, 2);
    segment.inputs.fresh = static_cast<Bytes>(static_cast<double>(segment.saved.fresh) * between(0.03, 0.4));
    segment.inputs.all = segment.inputs.fresh + one_of({0, 1}) * mib(0, 1);
    segment.parked_bytes = mib(0.5, 3);
    segment.forward_bytes = mib(1, 6);
    segment.backward_bytes = mib(1, 8);
    segment.weight_bytes = mib(0.5, 8);
    segment.slot_bytes = std::min<Bytes>(500'000, segment.weight_bytes);
    segment.gradients.all = mib(0.5, 8);
    segment.gradients.live = std::min(segment.gradients.all, segment.slot_bytes);
    const double drawn = between(0, 1);
    segment.freedom.recompute = drawn < 0.6   ? RecomputeScope::kInRounds
                                : drawn < 0.9 ? RecomputeScope::kAlone
                                              : RecomputeScope::kNever;
    if (may_compress) {
      segment.coding = SegmentCoding{segment.saved.fresh / 5, 0.3 * segment.forward_seconds};
    }
    return segment;
  }

  /// Something has to give: the budget is between the least and what keeps all at rounds of 1.
  ActivationProblem problem(std::size_t count, bool may_compress = false) {
    ActivationProblem problem;
    problem.cuts.emplace_back();
    double compute = 0;
    double saved = 0;
    Bytes in_use = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const ActivationSegment& added = problem.cuts[0].emplace_back(segment(may_compress));
      compute += added.forward_seconds + added.backward_seconds;
      saved += static_cast<double>(added.saved.fresh);
      in_use = std::max(in_use, added.backward_bytes + added.slot_bytes);
    }
    problem.microbatches = one_of({2, 4});
    const double least = static_cast<double>(least_budget(problem));
    const double most = saved + static_cast<double>(in_use);
    problem.machine.budget = static_cast<Bytes>(least + std::max(0.0, most - least) * between(0.02, 0.9));
    problem.machine.to_device = saved / compute * one_of({0.4, 0.7, 1.0, 1.5});
    problem.machine.to_host = problem.machine.to_device;
    return problem;
  }

 private:
  std::mt19937 generator_;
};

bool allow(const std::vector<ActivationSegment>& segments, const std::vector<Option>& options, int round_size) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (!allows(segments[i], options[i], round_size)) {
      return false;
    }
  }
  return true;
}

ActivationSegment plain_segment() {
  ActivationSegment segment;
  segment.forward_seconds = 1;
  segment.backward_seconds = 2;
  segment.saved = {100, 100};
  segment.inputs = {10, 10};
  segment.forward_bytes = 5;
  segment.backward_bytes = 7;
  segment.freedom.recompute = RecomputeScope::kInRounds;
  return segment;
}

ActivationMachine machine_of(Bytes budget, double speed = kNoActivationLimit) {
  ActivationMachine machine;
  machine.budget = budget;
  machine.to_device = speed;
  machine.to_host = speed;
  return machine;
}

double seconds_of(const ActivationSegment& segment, std::size_t count, const ActivationMachine& machine,
                  int microbatches, Option option, int round_size = 1, Bytes stash_bytes = 0) {
  const std::vector<ActivationSegment> segments(count, segment);
  return simulate_step(segments, machine, microbatches, {std::vector<Option>(count, option), round_size, stash_bytes})
      .seconds;
}

TEST(StepSimulation, WithoutMovingAStepTakesItsCompute) {
  const ActivationMachine machine = machine_of(10'000);
  EXPECT_EQ(seconds_of(plain_segment(), 3, machine, 2, Option::kKeep), 18);
  EXPECT_EQ(seconds_of(plain_segment(), 3, machine, 2, Option::kRecompute), 24);
  EXPECT_EQ(seconds_of(plain_segment(), 3, machine, 2, Option::kOffload), 18);
}

TEST(StepSimulation, WithoutRoomMovingDoesNotOverlapComputing) {
  EXPECT_EQ(seconds_of(plain_segment(), 3, machine_of(7, 100), 2, Option::kOffload), 18 + 2 * 3 * 2);
  EXPECT_DOUBLE_EQ(seconds_of(plain_segment(), 3, machine_of(107, 100), 2, Option::kRecomputeOffloaded),
                   24 + 2 * 3 * 0.2);
}

TEST(StepSimulation, WhatIsSavedLeavesBesideItsForwardAsFarAsThereIsRoom) {
  EXPECT_EQ(seconds_of(plain_segment(), 3, machine_of(57, 100), 2, Option::kOffload), 18 + 2 * 3 * 1.5);
  EXPECT_EQ(seconds_of(plain_segment(), 3, machine_of(107, 100), 2, Option::kOffload), 18 + 2 * 3 * 1);
  EXPECT_EQ(seconds_of(plain_segment(), 3, machine_of(10'000, 100), 2, Option::kOffload), 18 + 2 * 3 * 1);
}

TEST(StepSimulation, WhatLaterSegmentsKeepServesAsAStashUntilThen) {
  const std::vector<ActivationSegment> segments(4, plain_segment());
  const ActivationMachine machine = machine_of(307, 100);
  const auto seconds = [&](const std::vector<Option>& options) {
    return simulate_step(segments, machine, 1, {options, 1, 0}).seconds;
  };
  using enum Option;
  // The second segment's bytes come beside the third's backward, and the first's beside the second's.
  EXPECT_EQ(seconds({kOffload, kOffload, kKeep, kKeep}), 12);
  EXPECT_EQ(seconds({kOffload, kOffload, kOffload, kKeep}), 12 + 2);
  EXPECT_EQ(seconds({kOffload, kOffload, kOffload, kOffload}), 12 + 4);
}

TEST(StepSimulation, AStashHidesMovingBehindComputing) {
  const ActivationMachine machine = machine_of(10'000, 100);
  // Forward waits for no departure, and the first of backward comes while nothing runs, after the last has left.
  EXPECT_EQ(seconds_of(plain_segment(), 3, machine, 1, Option::kOffload, 1, 200), 9 + 1);
  // On a slow lane compute waits for what comes, also in backward.
  const ActivationMachine slow = machine_of(10'000, 50);
  EXPECT_EQ(seconds_of(plain_segment(), 3, slow, 1, Option::kOffload, 1, 1000), 3 + 2 + 6);
}

TEST(StepSimulation, WeightsComeAheadAsSoonAsThereIsRoom) {
  std::vector<ActivationSegment> segments(3, plain_segment());
  segments[2].weight_bytes = 200;
  const auto seconds = [&](Bytes budget) {
    return simulate_step(segments, machine_of(budget, 100), 1, {std::vector<Option>(3, Option::kKeep), 1, 0}).seconds;
  };
  EXPECT_EQ(seconds(10'000), 9);
  segments[1].backward_bytes = 500;  // the second segment leaves no room
  EXPECT_EQ(seconds(700), 9 + 2);
}

TEST(StepSimulation, WeightsThatHaveRoomComeOnce) {
  ActivationSegment segment = plain_segment();
  segment.weight_bytes = 1000;
  segment.slot_bytes = 10;
  EXPECT_EQ(seconds_of(segment, 1, machine_of(10'000, 1000), 2, Option::kKeep), 6 + 1);
  // Nothing stays, so each pass of each microbatch waits. With more room a part stays from each pass to the next.
  segment.saved = {};
  segment.slot_bytes = 0;
  EXPECT_EQ(seconds_of(segment, 2, machine_of(7, 1000), 2, Option::kKeep), 12 + 8);
  EXPECT_EQ(seconds_of(segment, 2, machine_of(507, 1000), 2, Option::kKeep), 12 + 8 - 3 * 0.5);
}

TEST(StepSimulation, GradientsLeaveBehindTheNextBackward) {
  ActivationSegment segment = plain_segment();
  segment.gradients.all = 100;
  EXPECT_EQ(seconds_of(segment, 2, machine_of(10'000, 100), 1, Option::kKeep), 6 + 1);
}

TEST(StepSimulation, AnUpdateCountsAsFarAsForwardDoesNotHideIt) {
  ActivationMachine machine = machine_of(10'000);
  machine.update_seconds = 5;
  EXPECT_EQ(seconds_of(plain_segment(), 2, machine, 2, Option::kKeep, 2), 12 + 1);
  // In rounds of one the next step's first microbatch reads all weights, before the second begins.
  EXPECT_EQ(seconds_of(plain_segment(), 2, machine, 2, Option::kKeep, 1), 12 + 3);
}

TEST(StepSimulation, ARecordSaysWhatEachLaneDoesWhen) {
  ActivationSegment segment = plain_segment();
  segment.weight_bytes = 200;
  segment.gradients = {50, 50};
  ActivationMachine machine = machine_of(10'000, 100);
  machine.update_seconds = 4;
  const ActivationTreatment treatment = {{Option::kOffload, Option::kRecompute}, 1, 100};
  StepRecord record;
  const SimulatedStep step = simulate_step({segment, segment}, machine, 1, treatment, &record);
  EXPECT_EQ(step.seconds, simulate_step({segment, segment}, machine, 1, treatment).seconds);
  struct Expected {
    StepWorkKind kind;
    std::optional<std::size_t> segment;
    double begin, end;
    Bytes bytes;
  };
  const std::vector<Expected> expected = {
      {StepWorkKind::kBringWeights, 0, 0, 2, 200},
      {StepWorkKind::kForward, 0, 2, 3, 0},
      {StepWorkKind::kSendStash, 0, 2, 3, 100},
      {StepWorkKind::kBringWeights, 1, 2, 4, 200},
      {StepWorkKind::kForward, 1, 4, 5, 0},
      {StepWorkKind::kRecompute, 1, 5, 6, 0},
      {StepWorkKind::kBackward, 1, 6, 8, 0},
      {StepWorkKind::kSendGradients, 1, 8, 8.5, 50},
      {StepWorkKind::kBringStash, 0, 5, 6, 100},
      {StepWorkKind::kBackward, 0, 8, 10, 0},
      {StepWorkKind::kSendGradients, 0, 10, 10.5, 50},
      {StepWorkKind::kUpdate, std::nullopt, 10.5, 12.5, 0},
  };
  ASSERT_EQ(record.work.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(record.work[i].kind, expected[i].kind);
    EXPECT_EQ(record.work[i].segment, expected[i].segment);
    EXPECT_EQ(record.work[i].begin, expected[i].begin);
    EXPECT_EQ(record.work[i].end, expected[i].end);
    EXPECT_EQ(record.work[i].bytes, expected[i].bytes);
  }
  EXPECT_EQ(record.stays, (std::vector<double>{0, 3, 5, 8}));
}

TEST(StepSimulation, WhatLeavesSoonerThanItIsSavedIsRecordedAtTheEndOfForward) {
  StepRecord record;
  simulate_step({plain_segment()}, machine_of(10'000, 200), 1, {{Option::kOffload}, 1, 100}, &record);
  ASSERT_EQ(record.work[1].kind, StepWorkKind::kSendStash);
  EXPECT_EQ(record.work[1].begin, 0.5);
  EXPECT_EQ(record.work[1].end, 1);
}

TEST(StepSimulation, WhatSeveralSegmentsKeepCountsOnce) {
  using enum ActivationOption;
  ActivationSegment sharing = plain_segment();
  sharing.saved = {40, 100};  // the other 60 were saved by the segment before it
  ActivationSegment outside;
  outside.saved = {5, 5};
  const std::vector<ActivationSegment> segments = {plain_segment(), sharing, sharing, outside};
  EXPECT_EQ(kept_until(segments, {kKeep, kKeep, kKeep, kKeep}), (std::vector<Bytes>{100, 145, 185, 185}));
  EXPECT_EQ(kept_until(segments, {kOffload, kKeep, kOffload, kOffload}), (std::vector<Bytes>{0, 100, 100, 100}));
  EXPECT_EQ(kept_until(segments, {kOffload, kKeep, kKeep, kOffload}), (std::vector<Bytes>{0, 100, 185, 185}));
  // Inputs that stay may be none of what was saved.
  EXPECT_EQ(kept_until(segments, {kKeep, kRecompute, kKeep, kOffload}), (std::vector<Bytes>{100, 110, 195, 195}));
  EXPECT_EQ(peak_bytes(segments, {{kKeep, kKeep, kKeep, kKeep}, 2, 50}), 50 + 2 * 185 + 7);
}

TEST(StepSimulation, MemoryIsWhatTheHeaderSays) {
  ActivationSegment segment = plain_segment();
  segment.parked_bytes = 3;
  segment.weight_bytes = 1000;
  segment.slot_bytes = 400;
  segment.gradients.all = 600;
  segment.gradients.live = 40;
  segment.inputs.all = 20;
  EXPECT_EQ(needed_bytes(segment, Option::kKeep, 1), 100 + 400 + 7 + 40);
  EXPECT_EQ(needed_bytes(segment, Option::kOffload, 3), 2 * 3 + 1000 + 7 + 600);
  EXPECT_EQ(needed_bytes(segment, Option::kRecompute, 3), 60 + 2 * 3 + 1000 + 7 + 600 + 100);
  EXPECT_EQ(peak_bytes({segment, segment}, {{Option::kKeep, Option::kOffload}, 3, 50}), 50 + 300 + 6 + 1607 + 0);
  EXPECT_EQ(peak_bytes({segment, segment}, {{Option::kKeep, Option::kKeep}, 1, 50}), 50 + 100 + 547);
  segment.gradients.live = 700;  // of weights that another segment has, too
  EXPECT_EQ(needed_bytes(segment, Option::kOffload, 3), 2 * 3 + 1000 + 7 + 700);
  EXPECT_EQ(host_bytes({segment, segment}, {{Option::kRecomputeOffloaded, Option::kOffload}, 3, 50}), 3 * 110);
}

TEST(ActivationPlan, RoomForEverythingKeepsEverything) {
  const ActivationProblem problem = {{{plain_segment(), plain_segment()}}, 2, machine_of(1000, 1), {}};
  const ActivationPlan plan = plan_activations(problem);
  EXPECT_EQ(plan.step.seconds, 12);
  EXPECT_EQ(plan.treatment.options, std::vector<Option>(2, Option::kKeep));
}

TEST(ActivationPlan, TheLeastBudgetIsEnough) {
  Chains chains(7);
  for (int round = 0; round < 20; ++round) {
    ActivationProblem problem = chains.problem(6, round % 2 == 0);
    problem.machine.budget = least_budget(problem);
    const ActivationPlan plan = plan_activations(problem, 0.1);
    EXPECT_LE(plan.peak_bytes, problem.machine.budget);
    --problem.machine.budget;
    try {
      plan_activations(problem, 0.1);
      FAIL() << "it fitted";
    } catch (const PlanDoesNotFit& error) {
      EXPECT_EQ(error.needed, problem.machine.budget + 1);
    }
  }
}

TEST(ActivationPlan, SegmentsRunAgainOnlyWhereTheyMay) {
  ActivationSegment segment = plain_segment();
  segment.freedom.recompute = RecomputeScope::kAlone;
  EXPECT_TRUE(allows(segment, Option::kRecompute, 1));
  EXPECT_FALSE(allows(segment, Option::kRecomputeOffloaded, 2));
  segment.freedom.recompute = RecomputeScope::kNever;
  EXPECT_FALSE(allows(segment, Option::kRecompute, 1));
  Chains chains(13);
  for (int round = 0; round < 20; ++round) {
    const ActivationProblem problem = chains.problem(8);
    const ActivationTreatment treatment = plan_activations(problem, 0.1).treatment;
    EXPECT_TRUE(allow(problem.cuts[0], treatment.options, treatment.round_size));
  }
}

TEST(ActivationPlan, ATreatmentIsJudgedAsItIsGiven) {
  const ActivationProblem problem = {{{plain_segment(), plain_segment()}}, 2, machine_of(250), {}};
  EXPECT_EQ(judge_activations(problem, 0, {{Option::kKeep, Option::kKeep}, 1, 10}).peak_bytes, 217);
  try {
    judge_activations(problem, 0, {{Option::kKeep, Option::kKeep}, 2, 0});
    FAIL() << "it fitted";
  } catch (const PlanDoesNotFit& error) {
    EXPECT_EQ(error.needed, 407);
  }
  for (const ActivationTreatment& senseless :
       {ActivationTreatment{{Option::kKeep}, 1, 0}, ActivationTreatment{{Option::kKeep, Option::kKeep}, 3, 0},
        ActivationTreatment{{Option::kKeep, Option::kKeep}, 1, -1},
        ActivationTreatment{{Option::kKeep, Option::kCompress}, 1, 0}}) {
    EXPECT_THROW(judge_activations(problem, 0, senseless), PlanError);
  }
  EXPECT_THROW(judge_activations(problem, 1, {{Option::kKeep, Option::kKeep}, 1, 0}), PlanError);
}

TEST(ActivationPlan, OnlyTheGivenRoundSizesAreTried) {
  ActivationSegment segment = plain_segment();
  segment.weight_bytes = 1000;
  segment.slot_bytes = 1000;
  segment.freedom.recompute = RecomputeScope::kAlone;
  // A round of all brings the weights once each way.
  ActivationProblem problem = {{{segment, segment, segment}}, 3, machine_of(1950, 100), {}};
  EXPECT_EQ(plan_activations(problem).treatment.round_size, 3);
  for (const int size : {1, 2}) {
    problem.round_sizes = {size};
    EXPECT_EQ(plan_activations(problem).treatment.round_size, size);
  }
  // Frugal treatments of larger rounds keep what is parked.
  problem.cuts[0][0].parked_bytes = 1000;
  problem.round_sizes = {2};
  EXPECT_EQ(least_budget(problem), least_budget({problem.cuts, 3, problem.machine, {1, 2}}) + 1000);
  EXPECT_THROW(plan_activations(problem), PlanDoesNotFit);
  for (const int size : {0, 4}) {
    problem.round_sizes = {size};
    EXPECT_THROW(plan_activations(problem), PlanError);
  }
}

TEST(ActivationPlan, IsNeverSlowerThanOneOptionForAll) {
  Chains chains(17);
  for (int round = 0; round < 20; ++round) {
    const ActivationProblem problem = chains.problem(20);
    const std::vector<ActivationSegment>& segments = problem.cuts[0];
    const double found = plan_activations(problem, 0).step.seconds;
    for (const Option option : {Option::kKeep, Option::kOffload, Option::kRecompute}) {
      for (const int size : round_sizes(problem.microbatches)) {
        std::vector<Option> options;
        for (const ActivationSegment& segment : segments) {
          options.push_back(allows(segment, option, size) ? option : Option::kKeep);
        }
        for (const Bytes stash_bytes : stash_sizes(segments)) {
          const ActivationTreatment treatment = {options, size, stash_bytes};
          if (peak_bytes(segments, treatment) <= problem.machine.budget) {
            EXPECT_LE(found, simulate_step(segments, problem.machine, problem.microbatches, treatment).seconds);
          }
        }
      }
    }
  }
}

TEST(ActivationPlan, AFinerCutIsTakenWhereItHelps) {
  ActivationProblem problem = {{{plain_segment()}}, 1, machine_of(80, 1), {}};
  problem.cuts[0][0].backward_bytes = 70;
  ActivationSegment half = plain_segment();
  half.forward_seconds = 0.5;
  half.backward_seconds = 1;
  half.saved = {30, 30};
  problem.cuts.push_back({half, half});
  const ActivationPlan plan = plan_activations(problem);
  EXPECT_EQ(plan.cut, 1);
  EXPECT_EQ(plan.step.seconds, 3);
}

TEST(ActivationPlan, SmallChainsAreAlmostAlwaysTreatedInTheBestWay) {
  Chains chains(11);
  int optimal = 0;
  double sum = 0;
  double worst = 0;
  constexpr int kRounds = 60;
  for (int round = 0; round < kRounds; ++round) {
    const ActivationProblem problem = chains.problem(round % 3 == 2 ? 4 : 5, round % 3 == 2);
    const double least = testing::least_activation_seconds(problem);
    const ActivationPlan plan = plan_activations(problem);
    ASSERT_LE(plan.peak_bytes, problem.machine.budget);
    const double gap = plan.step.seconds / least - 1;
    ASSERT_GE(gap, -1e-9);
    optimal += gap < 1e-9 ? 1 : 0;
    sum += gap;
    worst = std::max(worst, gap);
  }
  RecordProperty("optimal", optimal);
  EXPECT_GE(optimal, kRounds * 9 / 10);
  EXPECT_LE(sum / kRounds, 0.005);
  EXPECT_LE(worst, 0.05);
}

/// The most by which seconds rise above those of a smaller budget, over 30 budgets from the least to one that has room
/// for everything.
double worst_rise(ActivationProblem problem) {
  const auto least = static_cast<double>(least_budget(problem));
  Bytes most = 0;
  for (const ActivationSegment& segment : problem.cuts[0]) {
    most += problem.microbatches * segment.saved.all + segment.weight_bytes;
  }
  double before = kNoActivationLimit;
  double worst = 0;
  for (int step = 0; step < 30; ++step) {
    problem.machine.budget =
        static_cast<Bytes>(least * std::pow(static_cast<double>(most) / least + 1, step / 29.0)) + 1;
    const double seconds = plan_activations(problem, 0.1).step.seconds;
    worst = std::max(worst, seconds / before - 1);
    before = std::min(before, seconds);
  }
  return worst;
}

TEST(ActivationPlan, ALargerBudgetIsNotSlower) {
  Chains chains(19);
  for (const std::size_t count : {6u, 12u, 25u}) {
    EXPECT_LE(worst_rise(chains.problem(count)), 0.001) << count;
  }
}

TEST(StepSimulation, MoreRoomIsNotSlower) {
  Chains chains(23);
  for (int round = 0; round < 20; ++round) {
    ActivationProblem problem = chains.problem(12);
    const ActivationPlan plan = plan_activations(problem, 0);
    double before = plan.step.seconds;
    for (int step = 1; step < 100; ++step) {
      problem.machine.budget += problem.machine.budget / 100;
      const double seconds = judge_activations(problem, 0, plan.treatment).step.seconds;
      EXPECT_LE(seconds, before * (1 + 1e-12));
      before = seconds;
    }
  }
}

TEST(ActivationPlan, TheSameProblemHasTheSamePlan) {
  Chains chains(3);
  const ActivationProblem problem = chains.problem(40, true);
  EXPECT_EQ(plan_activations(problem, 0.2).treatment, plan_activations(problem, 0.2).treatment);
}

TEST(ActivationPlan, MoreEffortIsNotSlower) {
  Chains chains(5);
  const ActivationProblem problem = chains.problem(30);
  double before = kNoActivationLimit;
  for (const double effort : {0.0, 0.1, 1.0}) {
    const ActivationPlan plan = plan_activations(problem, effort);
    EXPECT_LE(plan.peak_bytes, problem.machine.budget);
    EXPECT_LE(plan.step.seconds, before * 1.001);
    before = plan.step.seconds;
  }
}

TEST(ActivationPlan, SenselessProblemsAreRefused) {
  const ActivationProblem good = {{{plain_segment()}}, 1, machine_of(1000), {}};
  EXPECT_NO_THROW(plan_activations(good, 0));
  ActivationProblem problem = good;
  problem.cuts.clear();
  EXPECT_THROW(plan_activations(problem), PlanError);
  problem = good;
  problem.cuts[0].clear();
  EXPECT_THROW(plan_activations(problem), PlanError);
  problem = good;
  problem.microbatches = 0;
  EXPECT_THROW(plan_activations(problem), PlanError);
  problem = good;
  problem.machine.to_host = 0;
  EXPECT_THROW(plan_activations(problem), PlanError);
  problem = good;
  problem.cuts[0][0].forward_seconds = kNoActivationLimit;
  EXPECT_THROW(plan_activations(problem), PlanError);
  problem = good;
  problem.cuts[0][0].saved.fresh = -1;
  EXPECT_THROW(plan_activations(problem), PlanError);
  problem = good;
  problem.machine.host_bytes = 1;
  problem.machine.budget = 50;
  EXPECT_THROW(plan_activations(problem), PlanError);
}

}  // namespace
}  // namespace hydra
