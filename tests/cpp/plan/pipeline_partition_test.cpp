#include "csrc/plan/cuts/pipeline_partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "csrc/plan/cuts/cut_chain.h"
#include "csrc/plan/cuts/cut_family.h"
#include "csrc/plan/cuts/cut_flow.h"
#include "csrc/plan/cuts/cut_relaxation.h"

namespace hydra {
namespace {

constexpr double kSamePlan = 1e-9;

/// Parallel parallel_branches of layers between a first and a last one, with costs from a seed.
ProfileGraph parallel_branches(int count, int length, unsigned seed) {
  std::mt19937 chance(seed);
  const auto amount = [&](int most) { return static_cast<double>(chance() % static_cast<unsigned>(most)); };
  std::vector<ProfileNode> nodes;
  for (int i = 0; i < count * length + 2; ++i) {
    nodes.push_back({1 + amount(5), 1000 * amount(9), 1000 * amount(4) * amount(3)});
  }
  std::vector<ProfileGraph::Edge> edges;
  const int last = count * length + 1;
  for (int branch = 0; branch < count; ++branch) {
    for (int i = 0; i < length; ++i) {
      const int node = 1 + branch * length + i;
      edges.emplace_back(i == 0 ? 0 : node - 1, node);
    }
    edges.emplace_back(branch * length + length, last);
  }
  return ProfileGraph(std::move(nodes), edges);
}

ProfileGraph random_profile_graph(int size, unsigned seed) {
  std::mt19937 chance(seed);
  const auto amount = [&](int most) { return static_cast<double>(chance() % static_cast<unsigned>(most)); };
  std::vector<ProfileNode> nodes;
  std::vector<ProfileGraph::Edge> edges;
  for (int node = 0; node < size; ++node) {
    nodes.push_back({amount(6), 1000 * amount(5), 1000 * amount(3)});
    for (int before = std::max(0, node - 4); before < node; ++before) {
      if (chance() % 5 < 2) {
        edges.emplace_back(before, node);
      }
    }
  }
  return ProfileGraph(std::move(nodes), edges);
}

PipelineTerms pipeline_terms(std::vector<int> machines, double bandwidth = 1e6) {
  PipelineTerms terms;
  for (const int count : machines) {
    terms.levels.push_back({count, bandwidth});
  }
  terms.transfers = true;
  return terms;
}

std::vector<PipelineTerms> several_pipeline_terms() {
  std::vector<PipelineTerms> found = {pipeline_terms({3}), pipeline_terms({8}, 1e7), pipeline_terms({2, 3}),
                                      pipeline_terms({5}, 3e5)};
  found.push_back(pipeline_terms({4}));
  found.back().transfers = false;
  found.push_back(pipeline_terms({4}));
  found.back().fewer = true;
  found.back().memory_cap = 20000;
  found.push_back(pipeline_terms({3}));
  found.back().straight = true;
  return found;
}

double best_of_all_sets(const ProfileGraph& graph, const PipelineTerms& terms) {
  const CutFamily family = cut_family(graph, *graph.closed_sets(100000));
  return best_in_family(family, terms, 0, kUnbounded, 1e-12).value;
}

TEST(ProfileGraph, HasTheClosedSetsOfItsShape) {
  EXPECT_EQ(parallel_branches(1, 3, 1).closed_sets(100)->size(), 6U);  // a chain of 5
  EXPECT_EQ(parallel_branches(2, 3, 1).closed_sets(100)->size(),
            18U);  // 4 * 4 between the ends, and two sets outside them
  EXPECT_FALSE(parallel_branches(2, 3, 1).closed_sets(17).has_value());
  const ProfileGraph graph = parallel_branches(2, 3, 1);
  const std::vector<NodeSet> sets = *graph.closed_sets(100);
  for (const NodeSet& set : sets) {
    set.for_each([&](int node) { EXPECT_TRUE(graph.ancestors(node).is_within(set)); });
  }
}

TEST(ProfileGraph, DoesNotListTheClosedSetsOfAVeryWideGraph) {
  EXPECT_FALSE(parallel_branches(3000, 1, 1).closed_sets(1'000'000'000).has_value());
}

TEST(ProfileGraph, RefusesWhatIsNoGraphOfLayers) {
  EXPECT_THROW(ProfileGraph({}, {}), PlanError);
  EXPECT_THROW(ProfileGraph({{1, 1, 1}}, {{0, 0}}), PlanError);
  EXPECT_THROW(ProfileGraph({{1, 1, 1}, {1, 1, 1}}, {{0, 1}, {1, 0}}), PlanError);
  EXPECT_THROW(ProfileGraph({{1, 1, 1}}, {{0, 1}}), PlanError);
  EXPECT_THROW(ProfileGraph({{-1, 1, 1}}, {}), PlanError);
  EXPECT_THROW(ProfileGraph({{1, kUnbounded, 1}}, {}), PlanError);
}

TEST(ProfileGraph, AnOutputThatSeveralLayersUseCrossesOnce) {
  const ProfileGraph graph({{1, 8, 0}, {1, 4, 0}, {1, 2, 0}}, {{0, 1}, {0, 2}, {0, 1}});
  NodeSet set(3);
  set.add(0);
  EXPECT_EQ(graph.crossing_bytes(set), 8);
  set.add(1);
  EXPECT_EQ(graph.crossing_bytes(set), 8);
}

TEST(CutFlow, FindsTheLeastCrossingAtEveryPrice) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const ProfileGraph graph = random_profile_graph(9, seed);
    std::vector<double> times;
    for (int node = 0; node < graph.size(); ++node) {
      times.push_back(graph.node(node).compute_ms);
    }
    const NodeSet inside = graph.ancestors(2);
    NodeSet outside = graph.descendants(7);
    outside -= inside;
    CutFlow flow(graph, inside, outside);
    const std::vector<NodeSet> sets = *graph.closed_sets(1000);
    for (const double price : {-1500.0, -200.0, 0.0, 90.0, 700.0}) {
      double least = kUnbounded;
      for (const NodeSet& set : sets) {
        if (inside.is_within(set) && !set.meets(outside)) {
          least = std::min(least, graph.crossing_bytes(set) + price * graph.sums(set).compute_ms);
        }
      }
      const CutFlow::Least found = flow.least(times, price);
      EXPECT_NEAR(found.value, least, 1e-3);
      EXPECT_NEAR(graph.crossing_bytes(found.set) + price * graph.sums(found.set).compute_ms, least, 1e-3);
      EXPECT_TRUE(inside.is_within(found.set) && !found.set.meets(outside));
    }
  }
}

TEST(CutRelaxation, NeverExceedsTheOptimum) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    const ProfileGraph graph = random_profile_graph(10, seed);
    for (const PipelineTerms& terms : several_pipeline_terms()) {
      const double best = best_of_all_sets(graph, terms);
      const double limit = std::min(1.2 * best, 1e6);  // a bound is at most the limit, so that best would prove nothing
      for (const bool complete : {false, true}) {
        const auto sets = complete ? graph.closed_sets(10000) : std::nullopt;
        CutRelaxation relaxation(graph, terms, sets);
        double bound = relaxation.bound(0, limit, 1e-6);
        for (int round = 0; round < 4; ++round) {
          EXPECT_LE(bound, best * (1 + kSamePlan));
          relaxation.divide(4);
          relaxation.halve(limit, 200);
          relaxation.narrow(limit);
          relaxation.refine(limit, 1000);
          bound = relaxation.bound(bound, limit, 1e-6);
        }
        EXPECT_LE(bound, best * (1 + kSamePlan));
      }
    }
  }
}

TEST(CutRelaxation, FineCellsOfAChainCloseTheGap) {
  const ProfileGraph graph = parallel_branches(1, 12, 3);
  const PipelineTerms terms = pipeline_terms({4});
  const double best = best_of_all_sets(graph, terms);
  CutRelaxation relaxation(graph, terms, std::nullopt);
  relaxation.divide(1000);
  double bound = 0;
  for (int round = 0; round < 9; ++round) {
    relaxation.halve(best, 1000);
    relaxation.narrow(best);
    bound = relaxation.bound(bound, best, 1e-6);
  }
  EXPECT_NEAR(bound, best, 0.001 * best);
}

TEST(PipelinePartition, IsOptimalIfTheClosedSetsCanBeListed) {
  for (const auto& [count, length] : {std::pair(2, 4), std::pair(3, 14)}) {  // 3375 sets take the long way
    const ProfileGraph graph = parallel_branches(count, length, 5);
    const PipelineTerms terms = pipeline_terms({6});
    const PipelinePartition found = partition_pipeline(graph, terms);
    EXPECT_NEAR(found.objective_ms, best_of_all_sets(graph, terms), kSamePlan * found.objective_ms);
    EXPECT_EQ(found.bound_ms, found.objective_ms);
  }
}

TEST(PipelinePartition, OfAWideGraphIsAPlanWithABound) {
  const ProfileGraph graph = parallel_branches(8, 4, 9);  // 5^8 closed sets
  for (const PipelineTerms& terms : {pipeline_terms({3}), pipeline_terms({2, 2})}) {
    const PipelinePartition found = partition_pipeline(graph, terms);
    EXPECT_LE(found.bound_ms, found.objective_ms);
    EXPECT_GE(found.bound_ms, (terms.levels.size() == 1 ? 0.9 : 0.7) * found.objective_ms);
    int replicas = 0;
    std::size_t nodes = 0;
    for (const PipelineStage& stage : found.stages) {
      replicas += stage.replicas;
      nodes += stage.nodes.size();
      EXPECT_EQ(stage.inner.empty(), terms.levels.size() == 1);
    }
    EXPECT_EQ(replicas, terms.levels.back().machines);
    EXPECT_EQ(nodes, static_cast<std::size_t>(graph.size()));
  }
}

TEST(CutChains, MayHaveAnyNumberOfStagesBetweenSetsOfOneCut) {
  const std::vector<Cut> cuts = {{}, {{0, 6}, {0, 6}, {0, 6}, 0}, {{6, 6}, {6, 6}, {6, 6}, 0}};
  CutOrder order(cuts.size());
  order.allow(0, 1);
  order.allow(0, 2);
  order.allow(1, 1);
  order.allow(1, 2);
  ChainTerms terms;
  terms.machines = 7;
  terms.straight = true;
  const CutChains chains(cuts, order, terms);
  const std::optional<CutChain> found = chains.within(6);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->replicas, std::vector<int>(7, 1));
  EXPECT_EQ(chains.usable(6), std::vector<bool>(3, true));
}

TEST(PipelinePartition, HasNoStagesIfNothingFits) {
  PipelineTerms terms = pipeline_terms({4});
  terms.straight = true;
  const ProfileGraph graph({{1, 1, 1}, {1, 1, 1}}, {{0, 1}});
  EXPECT_TRUE(partition_pipeline(graph, terms).stages.empty());
  terms.fewer = true;
  EXPECT_EQ(partition_pipeline(graph, terms).stages.size(), 2U);
}

TEST(PipelinePartition, RefusesTermsWithoutMeaning) {
  const ProfileGraph graph({{1, 1, 1}}, {});
  EXPECT_THROW(partition_pipeline(graph, pipeline_terms({})), PlanError);
  EXPECT_THROW(partition_pipeline(graph, pipeline_terms({0})), PlanError);
  EXPECT_THROW(partition_pipeline(graph, pipeline_terms({2}, 0)), PlanError);
  EXPECT_THROW(partition_pipeline(graph, pipeline_terms({2, 2, 2})), PlanError);
  EXPECT_THROW(partition_pipeline(ProfileGraph({{1e300, 0, 0}}, {}), pipeline_terms({2})), PlanError);
}

}  // namespace
}  // namespace hydra
