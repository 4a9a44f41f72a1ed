#include "csrc/plan/unequal_split.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "csrc/plan/chain.h"

namespace hydra {
namespace {

/// Layers in a row with these times, recomputed in twice the time with no bytes; each keeps a byte a microbatch.
LayerGraph row(const std::vector<double>& times) {
  LayerGraph graph;
  for (std::size_t i = 0; i < times.size(); ++i) {
    graph.layers.push_back({{times[i], 1, 0}, {2 * times[i], 0, 0}, 0});
    if (i > 0) {
      graph.edges.push_back({i - 1, i, 0});
    }
  }
  return graph;
}

SplitTerms split_terms(int devices, int microbatches, double memory) { return {memory, 1, devices, microbatches}; }

TEST(UnequalSplit, CutsWhereTheSlowestStageIsFastest) {
  LayerGraph graph = row({1, 1, 1, 3});
  for (Layer& layer : graph.layers) {
    layer.parameter_bytes = 1000;  // replicas would take long to sum them
  }
  const UnequalSplit split = split_unequally(graph, split_terms(2, 8, 100));
  ASSERT_EQ(split.stages.size(), 2U);
  EXPECT_EQ(split.stages[0].layers, (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_EQ(split.stages[1].layers, (std::vector<std::size_t>{3}));
  EXPECT_EQ(split.time, 3);
  EXPECT_EQ(split.bound, 3);
}

TEST(UnequalSplit, CountsEdgesThatEndInTheStageAndNoneThatPassBy) {
  LayerGraph graph = row({4, 1, 4});
  graph.edges[0].bytes = 1;
  graph.edges[1].bytes = 2;
  graph.edges.push_back({0, 2, 8});
  for (Layer& layer : graph.layers) {
    layer.parameter_bytes = 1000;
  }
  const UnequalSplit one = split_unequally(graph, split_terms(1, 8, 100));
  EXPECT_EQ(one.time, 9);
  graph.edges.back().bytes = 0;
  const UnequalSplit two = split_unequally(graph, split_terms(2, 8, 100));
  EXPECT_EQ(two.time, 7);  // 4 + 1 and an edge of one byte, or of two behind two layers
}

TEST(UnequalSplit, RecomputesWhatDoesNotFit) {
  const UnequalSplit split = split_unequally(row({3, 1, 1}), split_terms(1, 1, 2));
  ASSERT_EQ(split.stages.size(), 1U);
  EXPECT_EQ(split.time, 6);
  EXPECT_EQ(split.stages[0].recomputed.size(), 1U);
  EXPECT_NE(split.stages[0].recomputed[0], 0U);
}

TEST(UnequalSplit, FindsNoPlanIfNothingFits) {
  LayerGraph graph = row({1, 1});
  graph.layers[1].recomputed.fixed_bytes = 5;
  graph.layers[1].kept.fixed_bytes = 5;
  const UnequalSplit split = split_unequally(graph, split_terms(4, 4, 4));
  EXPECT_TRUE(split.stages.empty());
  EXPECT_FALSE(split.bound.has_value());
}

TEST(UnequalSplit, GivesAPlanAndABoundIfThereAreTooManyDownsets) {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> time(1, 9);
  LayerGraph graph;
  for (int i = 0; i < 40; ++i) {
    const double kept = time(random);
    graph.layers.push_back({{kept, 1, 0}, {2 * kept, 0, 0}, 200});
  }
  const UnequalSplit split = split_unequally(graph, split_terms(6, 6, 30));
  ASSERT_FALSE(split.stages.empty());
  ASSERT_TRUE(split.bound.has_value());
  EXPECT_LE(*split.bound, split.time);
  EXPECT_LT(split.time, 1.1 * *split.bound);
}

TEST(UnequalSplit, ReturnsWhatItHasIfComparisonsAreUsedUp) {
  const LayerGraph graph = row(std::vector<double>(50, 1));
  const UnequalSplit exact = split_unequally(graph, split_terms(7, 7, 20));
  EXPECT_EQ(exact.bound, exact.time);
  for (const double comparisons : {0.0, 100.0, 3000.0, 20'000.0}) {
    const UnequalSplit split = split_unequally(graph, split_terms(7, 7, 20), {40'000, comparisons});
    if (!split.stages.empty()) {
      EXPECT_GE(split.time, exact.time);
      EXPECT_LE(*split.bound, exact.time);
    }
  }
}

TEST(UnequalSplit, RefusesNumbersThatMakeNoSense) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(split_unequally({}, split_terms(1, 1, 1)), PlanError);
  EXPECT_THROW(split_unequally(row({-1}), split_terms(1, 1, 1)), PlanError);
  EXPECT_THROW(split_unequally(row({kNaN}), split_terms(1, 1, 1)), PlanError);
  EXPECT_THROW(split_unequally(row({1}), split_terms(0, 1, 1)), PlanError);
  EXPECT_THROW(split_unequally(row({1}), split_terms(1, 1, -1)), PlanError);
  EXPECT_THROW(split_unequally(row({1}), {1, 0, 1, 1}), PlanError);
  EXPECT_THROW(split_unequally(row({1e308, 1e308}), split_terms(1, 1, 9)), PlanError);
}

}  // namespace
}  // namespace hydra
