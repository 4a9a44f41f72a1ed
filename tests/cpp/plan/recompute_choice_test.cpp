#include "csrc/plan/recompute_choice.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <optional>
#include <random>

namespace hydra {
namespace {

using Answer = RecomputeChoice::Answer;

LayerSet whole(const LayerGraph& graph) {
  LayerSet set(graph.layers.size());
  for (std::size_t i = 0; i < graph.layers.size(); ++i) {
    set.add(i);
  }
  return set;
}

LayerGraph random_graph(std::mt19937* random, std::size_t layers) {
  std::uniform_int_distribution<int> bytes(0, 40);
  std::uniform_int_distribution<int> time(0, 9);
  LayerGraph graph;
  for (std::size_t i = 0; i < layers; ++i) {
    graph.layers.push_back({{1.0 * time(*random), 1.0 * bytes(*random), 1.0 * bytes(*random)},
                            {1.0 * time(*random), 1.0 * bytes(*random), 1.0 * bytes(*random)},
                            0});
  }
  return graph;
}

/// The least time of all ways that fit.
std::optional<double> least_time(const LayerGraph& graph, double memory, int in_flight) {
  std::optional<double> least;
  for (unsigned ways = 0; ways < 1U << graph.layers.size(); ++ways) {
    double time = 0;
    double bytes = 0;
    for (std::size_t i = 0; i < graph.layers.size(); ++i) {
      const LayerCost& cost = (ways >> i & 1) != 0 ? graph.layers[i].recomputed : graph.layers[i].kept;
      time += cost.time;
      bytes += cost.bytes(in_flight);
    }
    if (bytes <= memory && (!least || time < *least)) {
      least = time;
    }
  }
  return least;
}

TEST(RecomputeChoice, IsTheFastestOfAllThatFit) {
  std::mt19937 random(1);
  int fitting = 0;
  for (int round = 0; round < 400; ++round) {
    const LayerGraph graph = random_graph(&random, 1 + static_cast<std::size_t>(round % 9));
    const int in_flight = 1 + round % 3;
    const double memory = std::uniform_int_distribution<int>(0, 60 * (1 + round % 9))(random);
    RecomputeChoice choice(graph, memory);
    const auto found = choice.fastest(whole(graph), in_flight);
    const auto least = least_time(graph, memory, in_flight);
    ASSERT_EQ(found.has_value(), least.has_value());
    if (least) {
      ++fitting;
      EXPECT_EQ(found->time, *least);
      EXPECT_TRUE(found->exact);
      EXPECT_EQ(choice.fits_within(*least, whole(graph), in_flight), Answer::kYes);
      EXPECT_EQ(choice.fits_within(*least - 0.5, whole(graph), in_flight), Answer::kNo);
    } else {
      EXPECT_EQ(choice.fits_within(std::numeric_limits<double>::infinity(), whole(graph), in_flight), Answer::kNo);
    }
  }
  EXPECT_GT(fitting, 100);
  EXPECT_LT(fitting, 400);
}

TEST(RecomputeChoice, LooksOnlyAtTheStage) {
  LayerGraph graph;
  graph.layers = {{{1, 10, 0}, {2, 0, 0}, 0}, {{1, 10, 0}, {5, 0, 0}, 0}, {{1, 10, 0}, {2, 0, 0}, 0}};
  LayerSet stage(3);
  stage.add(1);
  stage.add(2);
  RecomputeChoice choice(graph, 10);
  const auto found = choice.fastest(stage, 1);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->recomputed, (std::vector<std::size_t>{2}));
  EXPECT_EQ(found->time, 3);
}

TEST(RecomputeChoice, ManyEqualLayersAreDecidedAtOnce) {
  LayerGraph graph;
  graph.layers.assign(300, {{1, 10, 0}, {2, 3, 0}, 0});
  RecomputeChoice choice(graph, 2001);
  const auto found = choice.fastest(whole(graph), 1);
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(found->exact);
  EXPECT_EQ(found->recomputed.size(), 143U);  // 999 / 7, rounded up
  EXPECT_EQ(choice.fits_within(442.9, whole(graph), 1), Answer::kNo);
}

}  // namespace
}  // namespace hydra
