#include "csrc/plan/chain_partition.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <vector>

namespace hydra {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

/// Events with these seconds, half of them forward, without crossing bytes and without memory.
Chain chain_of(const std::vector<double>& seconds) {
  Chain chain;
  for (const double each : seconds) {
    chain.events.push_back({each / 2, each / 2, 0, 0});
  }
  chain.boundaries.resize(seconds.size() - 1);
  return chain;
}

StageTerms terms_of(int stages, std::optional<Bytes> limit = std::nullopt) {
  StageTerms terms;
  terms.bandwidth = kInfinite;
  terms.limits.assign(static_cast<std::size_t>(stages), limit);
  return terms;
}

std::vector<int> cuts(const ChainPartition& partition) {
  std::vector<int> found;
  for (std::size_t i = 1; i < partition.stages.size(); ++i) {
    found.push_back(partition.stages[i].begin);
  }
  return found;
}

TEST(ChainPartition, TheSlowestStageIsAsFastAsItCanBe) {
  const ChainPartition partition = partition_chain(chain_of({4, 1, 1, 1, 1, 2}), terms_of(3));
  EXPECT_EQ(partition.period_seconds, 4);
  EXPECT_EQ(partition.stages.front().begin, 0);
  EXPECT_EQ(partition.stages.back().end, 6);
}

TEST(ChainPartition, OneStageIsTheWholeChain) {
  const ChainPartition partition = partition_chain(chain_of({1, 2}), terms_of(1));
  EXPECT_EQ(partition.period_seconds, 3);
  EXPECT_EQ(partition.crossing_bytes, 0);
  EXPECT_TRUE(cuts(partition).empty());
}

TEST(ChainPartition, AmongEqualPeriodsTheFewestBytesCross) {
  Chain chain = chain_of({5, 1, 1, 1, 1});
  for (std::size_t i = 0; i < 4; ++i) {
    chain.boundaries[i].crossing_bytes = 10;
  }
  chain.boundaries[2].crossing_bytes = 1;  // uneven: 7 seconds before it
  EXPECT_EQ(cuts(partition_chain(chain, terms_of(2))), std::vector<int>{1});
  chain.events[4].forward_seconds += 6;  // now the last stage is the slowest wherever the cuts are
  EXPECT_EQ(partition_chain(chain, terms_of(3)).crossing_bytes, 11);
}

TEST(ChainPartition, AmongEqualBytesTheStagesAreMostEven) {
  EXPECT_EQ(cuts(partition_chain(chain_of({9, 1, 1, 1, 1}), terms_of(3))), (std::vector<int>{1, 3}));
}

TEST(ChainPartition, CutsAreOnlyWhereTheyArePossible) {
  Chain chain = chain_of({1, 1, 1, 1});
  chain.boundaries[1].possible = false;
  EXPECT_EQ(partition_chain(chain, terms_of(2)).period_seconds, 3);
  EXPECT_THROW(partition_chain(chain, terms_of(4)), PlanError);
}

TEST(ChainPartition, BothSidesPayForABoundaryInBothDirections) {
  Chain chain = chain_of({1, 1});
  chain.boundaries[0].crossing_bytes = 100;
  StageTerms terms = terms_of(2);
  terms.bandwidth = 50;
  terms.latency = 0.5;
  EXPECT_EQ(partition_chain(chain, terms).period_seconds, 1 + 2 * (0.5 + 2));
  terms.overlapped = true;
  EXPECT_EQ(partition_chain(chain, terms).period_seconds, 2 * (0.5 + 2));
}

TEST(ChainPartition, EarlierStagesHoldActivationsOfMoreMicrobatches) {
  Chain chain = chain_of({1, 1, 1, 1});
  for (ChainEvent& event : chain.events) {
    event.parameter_bytes = 10;
    event.activation_bytes = 100;
  }
  StageTerms terms = terms_of(2);
  terms.versions = 2;
  const ChainPartition even = partition_chain(chain, terms);
  EXPECT_EQ(even.stages[0].bytes, 2 * 20 + 2 * 200);
  EXPECT_EQ(even.stages[1].bytes, 2 * 20 + 1 * 200);
  terms.limits.assign(2, 400);
  EXPECT_EQ(cuts(partition_chain(chain, terms)), std::vector<int>{1});
}

TEST(ChainPartition, SharedParametersAreCountedOnceInEveryStageThatUsesThem) {
  Chain chain = chain_of({1, 1, 1});
  chain.shared.push_back({7, {0, 2, 2}});
  const ChainPartition partition = partition_chain(chain, terms_of(3));
  EXPECT_EQ(partition.stages[0].bytes, 7);
  EXPECT_EQ(partition.stages[1].bytes, 0);
  EXPECT_EQ(partition.stages[2].bytes, 7);
  EXPECT_EQ(partition_chain(chain, terms_of(1)).stages[0].bytes, 7);
}

TEST(ChainPartition, WhatDoesNotFitSaysWhichStageAndWhatIsNeeded) {
  Chain chain = chain_of({1, 1, 1});
  chain.events[1].parameter_bytes = 50;
  try {
    partition_chain(chain, terms_of(2, 40));
    FAIL() << "it fitted";
  } catch (const PlanDoesNotFit& error) {
    EXPECT_EQ(error.needed, 50);
    EXPECT_EQ(error.limit, 40);
    EXPECT_NE(std::string(error.what()).find("stage " + std::to_string(error.stage)), std::string::npos);
  }
  EXPECT_NO_THROW(partition_chain(chain, terms_of(2, 50)));
}

TEST(ChainPartition, SenselessInputIsRefused) {
  const Chain good = chain_of({1, 1});
  Chain chain = good;
  chain.events[0].forward_seconds = -1;
  EXPECT_THROW(partition_chain(chain, terms_of(1)), PlanError);
  chain.events[0].forward_seconds = kInfinite;
  EXPECT_THROW(partition_chain(chain, terms_of(1)), PlanError);
  chain = good;
  chain.events[1].activation_bytes = std::numeric_limits<Bytes>::max();
  EXPECT_THROW(partition_chain(chain, terms_of(1)), PlanError);
  chain = good;
  chain.boundaries.clear();
  EXPECT_THROW(partition_chain(chain, terms_of(1)), PlanError);
  chain = good;
  chain.shared.push_back({1, {2}});
  EXPECT_THROW(partition_chain(chain, terms_of(1)), PlanError);
  EXPECT_THROW(partition_chain({}, terms_of(1)), PlanError);
  EXPECT_THROW(partition_chain(good, terms_of(0)), PlanError);
  StageTerms terms = terms_of(1);
  terms.bandwidth = 0;
  EXPECT_THROW(partition_chain(good, terms), PlanError);
}

}  // namespace
}  // namespace hydra
