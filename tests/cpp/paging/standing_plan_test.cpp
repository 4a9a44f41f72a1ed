// A standing plan goes on as planning anew would, and falls as soon as planning anew could find something else.
#include "csrc/paging/passes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "csrc/transfer/simulated_device.h"
#include "tests/cpp/paging/pager_support.h"

namespace hydra::test {
namespace {

constexpr Bytes kBlock = 512;
constexpr std::int32_t kBlocks = 4;
const std::vector<std::int32_t> kOrder = {0, 1, 2, 3, 3, 2, 1, 0, 0, 1};

class StandingPlanTest : public ::testing::Test {
 protected:
  StandingPlanTest() {
    for (std::int32_t i = 0; i < kBlocks; ++i) {
      table_.add("block " + std::to_string(i), kBlock, std::make_unique<FakeBlock>(random_bytes(kBlock, 1)));
      BlockPlace& place = table_.at(i).place;
      place.begin_reserving();
      place.land({.memory = memory_.at(static_cast<std::size_t>(i)).data(), .bytes = kBlock});
      place.begin_filling(device_.to_device(), Priority::kFault, i);
      place.ticket()->wait();
    }
  }

  std::vector<Use> future_from(std::size_t now) const {
    std::vector<Use> future;
    for (std::size_t when = now; when < kOrder.size(); ++when) {
      future.push_back({kOrder[when], room_ - static_cast<Bytes>(when), true});
    }
    return future;
  }

  /// Plans anew: all blocks of the future are wanted.
  void plan(std::size_t now, bool is_ahead) {
    const std::vector<Use> future = future_from(now);
    for (const auto& block : table_.all()) {
      block->outlook = {};
    }
    for (std::size_t when = future.size(); when-- > 0;) {
      table_.at(future[when].block).outlook = {.next_use = static_cast<std::int64_t>(when), .wanted = true};
    }
    plan_.set(table_, memory(), future, is_ahead);
  }

  PlannedMemory memory() const { return PlannedMemory::of(table_, limit_); }

  Bytes limit_ = 1 << 20;
  Bytes room_ = kBlocks * kBlock + static_cast<Bytes>(kOrder.size()) - 1;  // just enough for the last use
  SimulatedDevice device_;
  std::vector<std::vector<std::uint8_t>> memory_{kBlocks, std::vector<std::uint8_t>(kBlock)};
  BlockTable table_;
  StandingPlan plan_;
};

TEST_F(StandingPlanTest, RanksBlocksAsPlanningAnewWould) {
  for (const bool is_ahead : {true, false}) {
    plan(0, is_ahead);
    for (std::size_t now = is_ahead ? 0 : 1; now < kOrder.size(); ++now) {
      EXPECT_EQ(plan_.go_on(table_, memory(), kOrder[now]), room_ - static_cast<Bytes>(now));
      const std::vector<Use> future = future_from(now);
      for (std::int32_t block = 0; block < kBlocks; ++block) {
        const auto next = std::ranges::find(future, block, &Use::block);
        const Outlook& outlook = table_.at(block).outlook;
        EXPECT_EQ(outlook.wanted, next != future.end()) << block << " at " << now;
        EXPECT_EQ(outlook.next_use,
                  next == future.end() ? Outlook::kNever : next - future.begin() + static_cast<std::int64_t>(now))
            << block << " at " << now;
      }
    }
    EXPECT_EQ(plan_.go_on(table_, memory(), 2), std::nullopt) << "the future has ended";
  }
}

TEST_F(StandingPlanTest, FallsWhereThePassLeavesItsOrder) {
  plan(0, /*is_ahead=*/true);
  EXPECT_EQ(plan_.go_on(table_, memory(), 1), std::nullopt);
  EXPECT_EQ(plan_.go_on(table_, memory(), 0), std::nullopt) << "it has fallen";
}

TEST_F(StandingPlanTest, FallsOnceABlockIsWithoutItsBytes) {
  for (const bool loses_slot : {true, false}) {
    plan(0, /*is_ahead=*/true);
    ASSERT_NE(plan_.go_on(table_, memory(), 0), std::nullopt);
    BlockPlace& place = table_.at(3).place;
    place.become_stale();
    const Slot slot = loses_slot ? place.give_up_slot() : Slot{};
    EXPECT_EQ(plan_.go_on(table_, memory(), 1), std::nullopt);
    plan(0, /*is_ahead=*/true);
    EXPECT_EQ(plan_.go_on(table_, memory(), 0), std::nullopt) << "it never stood";
    if (loses_slot) {
      place.begin_reserving();
      place.land({.memory = slot.memory, .bytes = kBlock});
      place.begin_filling(device_.to_device(), Priority::kFault, 3);
      place.ticket()->wait();
    }
  }
}

TEST_F(StandingPlanTest, FallsWhenMemoryChanges) {
  plan(0, /*is_ahead=*/true);
  limit_ -= 1;
  EXPECT_EQ(plan_.go_on(table_, memory(), 0), std::nullopt);
  plan(0, /*is_ahead=*/true);
  table_.at(2).truth.settle(/*beside=*/8);
  EXPECT_EQ(plan_.go_on(table_, memory(), 0), std::nullopt);
  EXPECT_EQ(memory().settled, kBlock);
  EXPECT_EQ(memory().beside, 8);
}

TEST_F(StandingPlanTest, NeverStandsWhereNotAllFit) {
  room_ -= 1;
  plan(0, /*is_ahead=*/true);
  EXPECT_EQ(plan_.go_on(table_, memory(), 0), std::nullopt);
}

}  // namespace
}  // namespace hydra::test
