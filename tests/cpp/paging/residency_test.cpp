// Compares choose_resident() with Belady's rule, and checks its contract, on random futures.
#include "csrc/paging/residency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <set>

namespace hydra::test {
namespace {

/// Counts loads of unit blocks under Belady's rule with `slots` slots: evict the block used last, load only on use.
int belady_loads(const std::vector<std::int32_t>& order, std::size_t slots) {
  std::set<std::int32_t> resident;
  int loads = 0;
  for (std::size_t now = 0; now < order.size(); ++now) {
    if (resident.contains(order[now])) {
      continue;
    }
    ++loads;
    if (resident.size() == slots) {
      const auto next_use = [&](std::int32_t block) {
        return std::find(order.begin() + static_cast<std::ptrdiff_t>(now), order.end(), block) - order.begin();
      };
      resident.erase(*std::max_element(resident.begin(), resident.end(),
                                       [&](std::int32_t a, std::int32_t b) { return next_use(a) < next_use(b); }));
    }
    resident.insert(order[now]);
  }
  return loads;
}

/// Counts loads if at every moment exactly the blocks of choose_resident() are loaded and kept.
int planned_loads(const std::vector<std::int32_t>& order, std::int32_t blocks, Bytes slots) {
  std::vector<bool> resident(static_cast<std::size_t>(blocks), false);
  const std::vector<Bytes> sizes(static_cast<std::size_t>(blocks), 1);
  int loads = 0;
  for (std::size_t now = 0; now < order.size(); ++now) {
    std::vector<Use> future;
    for (std::size_t when = now; when < order.size(); ++when) {
      future.push_back({order[when], slots, true});
    }
    const std::vector<std::int32_t> wanted = choose_resident(future, sizes, resident);
    EXPECT_LE(static_cast<Bytes>(wanted.size()), slots);
    std::vector<bool> next(static_cast<std::size_t>(blocks), false);
    for (const std::int32_t block : wanted) {
      loads += resident[static_cast<std::size_t>(block)] ? 0 : 1;
      next[static_cast<std::size_t>(block)] = true;
    }
    resident = next;
  }
  return loads;
}

TEST(Residency, LoadsAsLittleAsBeladyForwardAndBackward) {
  for (std::int32_t blocks = 1; blocks <= 12; ++blocks) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(blocks));
    std::iota(order.begin(), order.end(), 0);
    std::vector<std::int32_t> back(order.rbegin(), order.rend());
    order.insert(order.end(), back.begin(), back.end());
    for (Bytes slots = 1; slots <= blocks; ++slots) {
      EXPECT_EQ(planned_loads(order, blocks, slots), belady_loads(order, static_cast<std::size_t>(slots)))
          << blocks << " blocks, " << slots << " slots";
      EXPECT_EQ(planned_loads(order, blocks, slots), 2 * blocks - slots);
    }
  }
}

TEST(Residency, NeverLoadsMoreThanOnceAUseAndNeverLessThanBeladyOnRandomOrders) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const std::int32_t blocks = 2 + static_cast<std::int32_t>(random() % 7);
    std::vector<std::int32_t> order(20);
    for (std::int32_t& block : order) {
      block = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(blocks));
    }
    const Bytes slots = 1 + static_cast<Bytes>(random() % static_cast<std::uint32_t>(blocks));
    const int planned = planned_loads(order, blocks, slots);
    EXPECT_GE(planned, belady_loads(order, static_cast<std::size_t>(slots)));
    EXPECT_LE(planned, static_cast<int>(order.size()));
  }
}

TEST(Residency, KeepsWithinTheRoomOfEveryMomentUntilTheNextUse) {
  std::mt19937 random(11);
  for (int round = 0; round < 500; ++round) {
    const std::size_t blocks = 2 + random() % 6;
    std::vector<Bytes> sizes(blocks);
    for (Bytes& size : sizes) {
      size = 1 + static_cast<Bytes>(random() % 9);
    }
    std::vector<Use> future;
    for (int i = 0; i < 15; ++i) {
      future.push_back({static_cast<std::int32_t>(random() % blocks), static_cast<Bytes>(random() % 30), true});
    }
    const std::vector<std::int32_t> wanted = choose_resident(future, sizes, std::vector<bool>(blocks, false));
    ASSERT_FALSE(wanted.empty());
    EXPECT_EQ(wanted.front(), future[0].block);
    if (wanted.size() == 1) {
      continue;  // the block in use is present, even without room
    }
    Bytes together = 0;
    for (const std::int32_t block : wanted) {
      together += sizes[static_cast<std::size_t>(block)];
    }
    EXPECT_LE(together, future[0].room);
  }
}

TEST(Residency, LoadsNothingForALaterWindowButKeepsWhatIsThere) {
  const std::vector<Bytes> sizes = {1, 1, 1};
  const std::vector<Use> future = {{0, 10, true}, {1, 10, false}, {2, 10, false}};
  EXPECT_EQ(choose_resident(future, sizes, {false, false, false}), (std::vector<std::int32_t>{0}));
  EXPECT_EQ(choose_resident(future, sizes, {true, false, true}), (std::vector<std::int32_t>{0, 2}));
}

TEST(Residency, DoesNotFetchPastABlockThatDoesNotFit) {
  const std::vector<Bytes> sizes = {1, 8, 1};
  const std::vector<Use> future = {{0, 5, true}, {1, 9, true}, {2, 9, true}};
  EXPECT_EQ(choose_resident(future, sizes, {false, false, false}), (std::vector<std::int32_t>{0}));
  EXPECT_EQ(choose_resident(future, sizes, {true, false, true}), (std::vector<std::int32_t>{0, 2}));
}

TEST(Residency, KnowsNothingOfAnEmptyFuture) {
  EXPECT_TRUE(choose_resident({}, std::vector<Bytes>{1, 2}, {false, false}).empty());
}

}  // namespace
}  // namespace hydra::test
