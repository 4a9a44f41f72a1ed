#include "csrc/plan/jobs/job_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "csrc/plan/chain.h"
#include "csrc/plan/jobs/exact_search.h"
#include "csrc/plan/jobs/job_batch.h"
#include "csrc/plan/jobs/list_schedule.h"
#include "csrc/plan/jobs/list_search.h"
#include "csrc/plan/jobs/makespan_bound.h"
#include "csrc/plan/jobs/option_table.h"
#include "csrc/plan/jobs/placed_lists.h"

namespace hydra {
namespace {

constexpr double kHour = 3600;

/// Figure 4 of Saturn.
JobBatch figure_4() {
  return {{4, 4},
          {{"A", {{2, 10 * kHour}, {3, 8 * kHour}, {4, 7 * kHour}}},
           {"B", {{1, 40 * kHour}, {2, 30 * kHour}, {3, 27 * kHour}, {4, 25 * kHour}}},
           {"C", {{4, 24 * kHour}}}}};
}

JobBatch random_batch(unsigned seed, int jobs, const std::vector<int>& nodes) {
  std::mt19937 random(seed);
  const auto draw = [&](int most) { return 1 + static_cast<int>(random() % static_cast<unsigned>(most)); };
  const int largest = *std::max_element(nodes.begin(), nodes.end());
  JobBatch batch{nodes, {}};
  for (int i = 0; i < jobs; ++i) {
    TrainingJob job{"job" + std::to_string(i), {}};
    for (int option = draw(3); option > 0; --option) {
      job.options.push_back({draw(largest), static_cast<double>(draw(20))});
    }
    batch.jobs.push_back(job);
  }
  return batch;
}

TEST(JobPlan, ProvesTheBestPlanOfSaturnsFigure4) {
  const JobPlan plan = plan_jobs(figure_4());
  EXPECT_EQ(plan.makespan, 30 * kHour);
  EXPECT_EQ(plan.bound, 30 * kHour);
  EXPECT_EQ(makespan_of(figure_4(), plan.placements), 30 * kHour);
}

TEST(JobPlan, IsTheSameForTheSameSeed) {
  const JobBatch batch = random_batch(1, 17, {2, 3});
  const JobPlan one = plan_jobs(batch, {7, 1});
  const JobPlan other = plan_jobs(batch, {7, 1});
  EXPECT_EQ(one.makespan, other.makespan);
  for (std::size_t job = 0; job < batch.jobs.size(); ++job) {
    EXPECT_EQ(one.placements[job].node, other.placements[job].node);
    EXPECT_EQ(one.placements[job].start, other.placements[job].start);
  }
  EXPECT_LE(one.bound, one.makespan);
}

TEST(JobPlan, OfNoJobsTakesNoTime) {
  const JobPlan plan = plan_jobs({{8}, {}});
  EXPECT_EQ(plan.makespan, 0);
  EXPECT_EQ(plan.bound, 0);
}

TEST(JobPlan, NamesTheJobThatFitsNoNode) {
  const JobBatch batch{{2, 4}, {{"wide", {{8, 1}, {6, 2}}}}};
  try {
    plan_jobs(batch);
    FAIL() << "no error";
  } catch (const PlanError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'wide'"), std::string::npos) << text;
    EXPECT_NE(text.find("at least 6 GPUs"), std::string::npos) << text;
  }
}

TEST(JobPlan, RefusesNumbersThatMakeNoSense) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(plan_jobs({{}, {}}), PlanError);
  EXPECT_THROW(plan_jobs({{0}, {}}), PlanError);
  EXPECT_THROW(plan_jobs({{8}, {{"a", {}}}}), PlanError);
  EXPECT_THROW(plan_jobs({{8}, {{"a", {{0, 1}}}}}), PlanError);
  EXPECT_THROW(plan_jobs({{8}, {{"a", {{1, -1}}}}}), PlanError);
  EXPECT_THROW(plan_jobs({{8}, {{"a", {{1, kNaN}}}}}), PlanError);
  EXPECT_THROW(plan_jobs({{8}, {{"a", {{1, 1}}}}}, {0, 0}), PlanError);
}

TEST(JobBatch, CountsGpusOverTime) {
  const JobBatch batch{{2}, {{"a", {{2, 3}}}, {"b", {{1, 4}}}}};
  EXPECT_EQ(makespan_of(batch, {{0, 0, 0}, {0, 0, 3}}), 7);
  EXPECT_THROW(makespan_of(batch, {{0, 0, 0}, {0, 0, 2}}), PlanError);
  EXPECT_THROW(makespan_of(batch, {{0, 0, 0}}), PlanError);
  EXPECT_THROW(makespan_of(batch, {{0, 0, 0}, {1, 0, 3}}), PlanError);
  EXPECT_THROW(makespan_of(batch, {{0, 0, 0}, {0, 1, 3}}), PlanError);
}

TEST(OptionTable, LeavesOutWhatIsNeverBetter) {
  const OptionTable table({{4}, {{"a", {{2, 5}, {1, 9}, {2, 6}, {3, 5}, {4, 1}, {8, 0.5}}}}});
  ASSERT_EQ(table.of(0).size(), 3U);
  EXPECT_EQ(table.option(0, 0).place, 1U);
  EXPECT_EQ(table.option(0, 1).place, 0U);
  EXPECT_EQ(table.option(0, 2).place, 4U);
  EXPECT_EQ(table.fitting(0, 3), 2U);
}

TEST(MakespanBound, UsesThatHalvesOfANodeAndMoreShareNone) {
  // Three jobs of 3 GPUs: two nodes of 4 have to run two of them in a row, and the work alone would fit into 9 s.
  const OptionTable table({{4, 4}, {{"a", {{3, 8}}}, {"b", {{3, 8}}}, {"c", {{3, 8}}}}});
  EXPECT_EQ(plain_bound(table), 9);
  EXPECT_NEAR(makespan_bound(table, 100), 16, 1e-6);
}

TEST(MakespanBound, IsNeverAboveTheBestMakespan) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const OptionTable table(random_batch(seed, 5, seed % 2 == 0 ? std::vector{3} : std::vector{2, 3}));
    const JobLists greedy = greedy_lists(table);
    ExactSearch exact(table);
    ASSERT_TRUE(exact.run(std::numeric_limits<double>::max(), 10'000'000));
    const double best = makespan_of(table, *exact.found());
    EXPECT_LE(best, makespan_of(table, greedy));
    EXPECT_LE(plain_bound(table), best);
    for (const double known : {best, 1.5 * best, 4 * best}) {
      EXPECT_LE(makespan_bound(table, known), best) << seed;
    }
  }
}

TEST(ExactSearch, SaysIfTheBranchesDidNotDo) {
  const OptionTable table(random_batch(3, 8, {4}));
  ExactSearch exact(table);
  EXPECT_FALSE(exact.run(std::numeric_limits<double>::max(), 5));
  EXPECT_TRUE(exact.run(std::numeric_limits<double>::max(), 10'000'000));
  const double best = makespan_of(table, *exact.found());
  EXPECT_TRUE(exact.run(best, 10'000'000));
  EXPECT_FALSE(exact.found().has_value());
}

TEST(PlacedLists, CountAMoveAsPlacingEverythingAnew) {
  const OptionTable table(random_batch(9, 12, {3, 4}));
  PlacedLists lists(table, greedy_lists(table));
  std::mt19937 random(2);
  for (int i = 0; i < 200; ++i) {
    const std::size_t job = random() % table.jobs();
    const std::size_t node = lists.node_of(job);
    const std::size_t place = lists.place_of(job);
    ListMove move;
    move.lists[0] = {node, 0, lists.jobs_of(node)};
    std::rotate(move.lists[0].jobs.begin(), move.lists[0].jobs.begin() + static_cast<std::ptrdiff_t>(place),
                move.lists[0].jobs.end());
    move.list_count = 1;
    move.jobs[0] = job;
    move.choices[0] = random() % table.fitting(job, table.nodes()[node]);
    move.job_count = 1;
    const double cost = lists.cost_of(move, std::numeric_limits<double>::max());
    EXPECT_GT(lists.cost_of(move, 0.99 * cost), 0.99 * cost);
    lists.apply(move);
    EXPECT_NEAR(lists.cost(), cost, 1e-9 * cost);
    EXPECT_NEAR(PlacedLists(table, lists.lists()).cost(), cost, 1e-9 * cost);
    EXPECT_EQ(makespan_of(table, lists.lists()), lists.makespan());
  }
}

TEST(ListSearch, FindsWhatGreedyListsMiss) {
  const OptionTable table({{2}, {{"a", {{1, 3}}}, {"b", {{1, 3}}}, {"c", {{1, 2}}}, {"d", {{1, 2}}}, {"e", {{1, 2}}}}});
  const JobLists greedy = greedy_lists(table);
  EXPECT_EQ(makespan_of(table, greedy), 7);
  ListSearch search(table, greedy, 1);
  search.run(100'000, {1e-1, 1e-3}, 6);
  EXPECT_EQ(search.makespan(), 6);
  EXPECT_EQ(makespan_of(table, search.best()), 6);
}

}  // namespace
}  // namespace hydra
