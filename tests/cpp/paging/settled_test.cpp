// Settled blocks, whose home is their slot: they stay, plans leave their room alone, and they are evicted last.
#include <gtest/gtest.h>

#include <functional>

#include "csrc/base/errors.h"
#include "csrc/memory/limited_resource.h"
#include "csrc/paging/pager.h"
#include "csrc/transfer/simulated_device.h"
#include "tests/cpp/paging/pager_support.h"

namespace hydra::test {
namespace {

class SettledTest : public ::testing::Test {
 protected:
  static constexpr Bytes kBlock = 1024;
  static constexpr std::int32_t kBlocks = 4;

  void SetUp() override {
    for (std::int32_t i = 0; i < kBlocks; ++i) {
      auto client = std::make_unique<FakeBlock>(random_bytes(kBlock, static_cast<std::uint32_t>(i + 1)));
      blocks_.push_back(client.get());
      pager_.add_block("block " + std::to_string(i), kBlock, std::move(client));
    }
  }
  void TearDown() override {
    pager_.close();
    EXPECT_EQ(ledger_.in_use(), 0);
  }

  void settle(std::int32_t block, Bytes beside) {
    pager_.acquire(block, AcquireReason::kHook);
    pager_.contents().settle(block, beside);
    pager_.release(block, AcquireReason::kHook);
  }
  void visit(std::int32_t block) {
    pager_.passes().arrive(block);
    EXPECT_TRUE(blocks_[static_cast<std::size_t>(block)]->equal());
    pager_.release(block, AcquireReason::kHook);
  }
  void pass() {
    pager_.passes().begin(PassKind::kForward);
    for (std::int32_t i = 0; i < kBlocks; ++i) {
      visit(i);
    }
    pager_.passes().end(true);
  }

  SimulatedDevice device_;
  Ledger ledger_{3 * kBlock};
  LimitedResource slots_{device_.slots(), ledger_, MemoryClass::kWeights};
  std::function<bool()> last_resort_;
  Pager pager_{
      device_, slots_, ledger_, {.relief = {.last_resort = [this] { return last_resort_ && last_resort_(); }}}};
  std::vector<FakeBlock*> blocks_;
};

TEST_F(SettledTest, ASettledBlockKeepsItsSlotWhateverElseIsFetched) {
  pass();
  settle(1, 0);
  void* const slot = pager_.contents().of(1).memory;
  pass();
  pass();
  EXPECT_EQ(pager_.contents().of(1).memory, slot);
  EXPECT_TRUE(blocks_[1]->readable());
  EXPECT_EQ(pager_.pins(), 0);
}

TEST_F(SettledTest, PlansLeaveTheRoomBesideASettledBlockAlone) {
  pass();
  settle(3, kBlock);  // of three slots, the block has one and reserves one
  for (int i = 0; i < 3; ++i) {
    pager_.passes().begin(PassKind::kForward);
    for (std::int32_t block = 0; block < kBlocks; ++block) {
      visit(block);
      EXPECT_LE(pager_.resident_bytes(), 2 * kBlock);
    }
    pager_.passes().end(true);
  }
}

TEST_F(SettledTest, TheLastResortIsAskedWhenNothingElseCanGo) {
  int asked = 0;
  last_resort_ = [&] {
    ++asked;
    const std::int32_t block = pager_.contents().last_needed_settled();
    if (block >= 0) {
      EXPECT_TRUE(pager_.contents().unsettle(block, pager_.contents().of(block).writes));
    }
    return block >= 0;
  };
  for (std::int32_t block = 0; block < 3; ++block) {
    settle(block, 0);
  }
  EXPECT_EQ(asked, 0);
  pager_.acquire(3, AcquireReason::kHook);
  EXPECT_EQ(asked, 1);
  pager_.release(3, AcquireReason::kHook);
  EXPECT_TRUE(pager_.evict_one());  // block 3
  EXPECT_TRUE(pager_.evict_one());  // one block leaves its home,
  EXPECT_EQ(asked, 2);
  EXPECT_TRUE(pager_.evict_one());  // and is evicted
  EXPECT_EQ(asked, 2);
}

TEST_F(SettledTest, OnlyAnAcquiredBlockCanSettle) {
  EXPECT_THROW(pager_.contents().settle(0, 0), StateError);
  EXPECT_EQ(pager_.contents().last_needed_settled(), -1);
}

TEST_F(SettledTest, WhatIsWrittenWhileABlockComesHomeIsNotTakenForHome) {
  settle(1, 0);
  pager_.contents().mark_dirty(1);
  const std::int64_t before = pager_.contents().of(1).writes;
  pager_.contents().mark_dirty(1);
  EXPECT_FALSE(pager_.contents().unsettle(1, before));
  EXPECT_TRUE(pager_.contents().unsettle(1, pager_.contents().of(1).writes));
  EXPECT_TRUE(pager_.evict_one()) << "clean, and so it can go";

  settle(2, 0);
  pager_.acquire(2, AcquireReason::kFault);
  pager_.contents().mark_dirty(2);  // before the write
  const std::int64_t during = pager_.contents().of(2).writes;
  EXPECT_TRUE(pager_.contents().unsettle(2, during)) << "the end of the window brings it home";
  pager_.release(2, AcquireReason::kFault);
  EXPECT_EQ(pager_.statistics().write_backs, 0);
  EXPECT_TRUE(pager_.evict_one());
  EXPECT_EQ(pager_.statistics().write_backs, 1) << "dirty: it goes home first";
}

}  // namespace
}  // namespace hydra::test
