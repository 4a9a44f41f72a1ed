#include "csrc/plan/layer_graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "csrc/plan/chain.h"

namespace hydra {
namespace {

LayerGraph graph_of(std::size_t layers, const std::vector<std::pair<std::size_t, std::size_t>>& edges) {
  LayerGraph graph;
  graph.layers.resize(layers);
  for (const auto& [from, to] : edges) {
    graph.edges.push_back({from, to, 0});
  }
  return graph;
}

LayerSet set_of(std::size_t layers, const std::vector<std::size_t>& members) {
  LayerSet set(layers);
  for (const std::size_t member : members) {
    set.add(member);
  }
  return set;
}

TEST(LayerSet, HoldsLayersBeyondOneWord) {
  LayerSet set = set_of(200, {0, 63, 64, 199});
  EXPECT_EQ(set.layers(), (std::vector<std::size_t>{0, 63, 64, 199}));
  EXPECT_EQ(set.size(), 4U);
  set.remove(64);
  EXPECT_FALSE(set.has(64));
  EXPECT_TRUE(set.within(set_of(200, {0, 1, 63, 199})));
  EXPECT_FALSE(set.within(set_of(200, {0, 63})));
  EXPECT_EQ(set.without(set_of(200, {63, 70})), set_of(200, {0, 199}));
}

TEST(Precedence, ADiamondHasSixDownsets) {
  const Precedence precedence(graph_of(4, {{0, 1}, {0, 2}, {1, 3}, {2, 3}}));
  const auto found = precedence.downsets(6);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(*found, (std::vector<LayerSet>{set_of(4, {}), set_of(4, {0}), set_of(4, {0, 1}), set_of(4, {0, 2}),
                                           set_of(4, {0, 1, 2}), set_of(4, {0, 1, 2, 3})}));
  EXPECT_FALSE(precedence.downsets(5).has_value());
}

TEST(Precedence, ManyDownsetsAreGivenUpEarly) {
  EXPECT_FALSE(Precedence(graph_of(3000, {})).downsets(10'000).has_value());
}

TEST(Precedence, OrdersPutInputsFirst) {
  const Precedence precedence(graph_of(5, {{4, 3}, {4, 0}, {3, 1}, {0, 2}}));
  EXPECT_EQ(precedence.breadth_first(), (std::vector<std::size_t>{4, 3, 0, 1, 2}));
  EXPECT_EQ(precedence.depth_first(), (std::vector<std::size_t>{4, 0, 2, 3, 1}));
}

TEST(Precedence, NeighboursAreDownsetsThatDifferInFewLayers) {
  const Precedence precedence(graph_of(4, {{0, 1}, {0, 2}, {1, 3}, {2, 3}}));
  const std::vector<LayerSet> near = precedence.neighbours(set_of(4, {0, 1}), 3);
  EXPECT_EQ(near, (std::vector<LayerSet>{set_of(4, {0, 1}), set_of(4, {0, 1, 2}), set_of(4, {0})}));
  EXPECT_EQ(precedence.neighbours(set_of(4, {}), 100).size(), 6U);
}

TEST(Precedence, CyclesAndUnknownLayersAreRefused) {
  EXPECT_THROW(Precedence(graph_of(3, {{0, 1}, {1, 2}, {2, 1}})), PlanError);
  EXPECT_THROW(Precedence(graph_of(1, {{0, 0}})), PlanError);
  EXPECT_THROW(Precedence(graph_of(2, {{0, 2}})), PlanError);
}

}  // namespace
}  // namespace hydra
