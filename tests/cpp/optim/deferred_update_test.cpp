#include "csrc/optim/deferred_update.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "csrc/base/errors.h"
#include "tests/cpp/optim/support.h"
#include "tests/cpp/support.h"

namespace hydra {
namespace {

using test::Content;
using test::Memory;

constexpr std::int64_t kCount = 50'000;

/// Weights of several blocks, and their updates as a step of the blocks in the order given.
struct Blocks {
  std::vector<std::unique_ptr<Memory>> memory;

  explicit Blocks(std::uint32_t count) {
    for (std::uint32_t block = 0; block < count; ++block) {
      memory.push_back(std::make_unique<Memory>(test::all_kinds().front(), kCount, 1, Content::kNumbers, block));
    }
  }

  std::vector<DeferredUpdate::Part> parts(const std::vector<std::int32_t>& order) {
    std::vector<DeferredUpdate::Part> made;
    for (const std::int32_t block : order) {
      made.emplace_back().blocks = {block};
      made.back().plan.add(memory[static_cast<std::size_t>(block)]->update());
    }
    return made;
  }

  void update_now(float scale) {
    for (const auto& one : memory) {
      run_update(one->update(), 0, kCount, scale);
    }
  }

  std::int64_t differences(const Blocks& other) const {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < memory.size(); ++i) {
      sum += memory[i]->differences(*other.memory[i]);
    }
    return sum;
  }
};

std::shared_ptr<ThreadPool> pool(int threads) { return std::make_shared<ThreadPool>(threads); }

TEST(DeferredUpdate, IsTheSameAsAnUpdateAtOnce) {
  Blocks wanted(5);
  wanted.update_now(0.5F);
  for (const int threads : {1, 3}) {
    Blocks blocks(5);
    EXPECT_GT(blocks.differences(wanted), 5 * kCount / 2);
    DeferredUpdate update(blocks.parts({3, 1, 0, 2, 4}), pool(threads), 0.5F);
    update.wait_all();
    EXPECT_EQ(blocks.differences(wanted), 0);
    EXPECT_GT(update.seconds(), 0.0);
  }
}

TEST(DeferredUpdate, ABlockThatIsWaitedForIsDoneWhenWaitReturns) {
  Blocks wanted(8);
  wanted.update_now(1.0F);
  for (std::int32_t block = 0; block < 8; ++block) {
    Blocks blocks(8);
    DeferredUpdate update(blocks.parts({0, 1, 2, 3, 4, 5, 6, 7}), pool(1), 1.0F);
    update.wait(block);
    EXPECT_TRUE(update.finished(block));
    const auto index = static_cast<std::size_t>(block);
    EXPECT_EQ(blocks.memory[index]->differences(*wanted.memory[index]), 0);
  }
}

TEST(DeferredUpdate, ABlockThatIsWaitedForIsUpdatedBeforeThoseOfAnEarlierTurn) {
  bool before = false;  // a waiting thread may be late, but not every time
  for (int attempt = 0; attempt < 200 && !before; ++attempt) {
    Blocks blocks(8);
    DeferredUpdate update(blocks.parts({0, 1, 2, 3, 4, 5, 6, 7}), pool(1), 1.0F);
    update.wait(7);
    before = !update.finished(6);
  }
  EXPECT_TRUE(before);
}

TEST(DeferredUpdate, ThreadsMayWaitForDifferentBlocksAtOnce) {
  Blocks wanted(12);
  wanted.update_now(1.0F);
  Blocks blocks(12);
  DeferredUpdate update(blocks.parts({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), pool(2), 1.0F);
  std::vector<std::thread> threads;
  for (const std::int32_t first : {11, 6, 0}) {
    threads.emplace_back([&update, &blocks, &wanted, first] {
      for (std::int32_t block = first; block >= 0; block -= 3) {
        update.wait(block);
        const auto index = static_cast<std::size_t>(block);
        EXPECT_EQ(blocks.memory[index]->differences(*wanted.memory[index]), 0);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(DeferredUpdate, BlocksThatAreUpdatedTogetherAreFinishedTogether) {
  Blocks wanted(3);
  wanted.update_now(1.0F);
  for (const std::int32_t waited : {1, 2}) {
    Blocks blocks(3);
    std::vector<DeferredUpdate::Part> parts = blocks.parts({0, 1});
    parts.back().blocks = {1, 2};
    parts.back().plan.add(blocks.memory[2]->update());
    DeferredUpdate update(std::move(parts), pool(1), 1.0F);
    update.wait(waited);
    EXPECT_TRUE(update.finished(1) && update.finished(2));
    EXPECT_EQ(blocks.memory[1]->differences(*wanted.memory[1]), 0);
    EXPECT_EQ(blocks.memory[2]->differences(*wanted.memory[2]), 0);
  }
}

TEST(DeferredUpdate, ABlockWithoutAPartIsFinished) {
  Blocks blocks(1);
  DeferredUpdate update(blocks.parts({0}), pool(1), 1.0F);
  update.wait(7);
  EXPECT_TRUE(update.finished(7));
}

TEST(DeferredUpdate, EndsOnlyWhenAllIsDone) {
  Blocks wanted(6);
  wanted.update_now(1.0F);
  Blocks blocks(6);
  {
    const DeferredUpdate update(blocks.parts({5, 4, 3, 2, 1, 0}), pool(1), 1.0F);
  }
  EXPECT_EQ(blocks.differences(wanted), 0);
}

TEST(DeferredUpdate, IsInTheActivityLogBlockByBlock) {
  Blocks blocks(4);
  const std::vector<std::int32_t> order{2, 0, 3, 1};
  ActivityLog log;
  log.start(10);
  DeferredUpdate update(blocks.parts(order), pool(2), 1.0F, 0.0, &log);
  update.wait_all();
  const std::vector<Activity> done = log.stop().activities;
  ASSERT_EQ(done.size(), 4U);
  for (std::size_t i = 0; i < done.size(); ++i) {
    EXPECT_EQ(done[i].row, ActivityRow::kOptimizer);
    EXPECT_EQ(done[i].kind, ActivityKind::kUpdate);
    EXPECT_EQ(done[i].label.block, order[i]);
    EXPECT_EQ(done[i].bytes, blocks.parts({order[i]}).front().plan.traffic_bytes());
    EXPECT_TRUE(i == 0 || done[i - 1].end <= done[i].begin);
  }
}

TEST(DeferredUpdate, SaysHowLongItWasWaitedFor) {
  Blocks blocks(2);
  DeferredUpdate update(blocks.parts({0, 1}), pool(1), 1.0F);
  update.wait_all();
  EXPECT_EQ(update.wait_all(), 0.0);
  EXPECT_EQ(update.wait(1), 0.0);
  EXPECT_EQ(update.wait(7), 0.0);
}

TEST(DeferredUpdate, TakesAtLeastItsBytesByTheSpeedOfMemoryAndChangesNoBit) {
  Blocks wanted(4);
  wanted.update_now(1.0F);
  Blocks blocks(4);
  constexpr double kSpeed = 1e9;
  const auto start = std::chrono::steady_clock::now();
  DeferredUpdate update(blocks.parts({0, 1, 2, 3}), pool(1), 1.0F, kSpeed);
  update.wait(3);
  const std::int64_t bytes = update.bytes();
  EXPECT_GE(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
            static_cast<double>(bytes) / kSpeed);
  update.wait_all();
  EXPECT_EQ(blocks.differences(wanted), 0);
  EXPECT_GE(bytes, blocks.parts({0}).front().plan.traffic_bytes());  // other blocks may be under way
  EXPECT_EQ(update.bytes(), 4 * blocks.parts({0}).front().plan.traffic_bytes());
  EXPECT_GE(update.seconds(), static_cast<double>(update.bytes()) / kSpeed);
}

TEST(DeferredUpdate, OfNothingIsDone) {
  DeferredUpdate update({}, pool(1), 1.0F);
  update.wait_all();
  EXPECT_EQ(update.seconds(), 0.0);
}

/// Lends its plan, and fails where the test says.
class ScriptedLender final : public Lender {
 public:
  enum class Fails { kNever, kBorrow, kGiveBack };

  ScriptedLender(StepPlan plan, std::string name, std::vector<std::string>& log, Fails fails)
      : plan_(std::move(plan)), name_(std::move(name)), log_(log), fails_(fails) {}

  void expect() noexcept override { log_.push_back("expect " + name_); }
  StepPlan borrow() override {
    log_.push_back("borrow " + name_);
    HYDRA_EXPECT(fails_ != Fails::kBorrow, SpillError, "no bytes for " + name_);
    return plan_;
  }
  void give_back() override {
    log_.push_back("give back " + name_);
    HYDRA_EXPECT(fails_ != Fails::kGiveBack, SpillError, "no place for " + name_);
  }

 private:
  StepPlan plan_;
  std::string name_;
  std::vector<std::string>& log_;  // written by one thread
  Fails fails_;
};

std::vector<DeferredUpdate::Part> lent(Blocks& blocks, std::vector<std::string>& log, std::int32_t failing,
                                       ScriptedLender::Fails fails) {
  std::vector<DeferredUpdate::Part> parts = blocks.parts({0, 1, 2});
  for (DeferredUpdate::Part& part : parts) {
    part.lender =
        std::make_unique<ScriptedLender>(std::move(part.plan), std::to_string(part.blocks.front()), log,
                                         part.blocks.front() == failing ? fails : ScriptedLender::Fails::kNever);
    part.plan = StepPlan();
  }
  return parts;
}

/// Lends once the test lets it.
class HeldLender final : public Lender {
 public:
  HeldLender(StepPlan plan, test::Gate& gate) : plan_(std::move(plan)), gate_(gate) {}
  void expect() noexcept override {}
  StepPlan borrow() override {
    gate_.wait();
    return plan_;
  }
  void give_back() override {}

 private:
  StepPlan plan_;
  test::Gate& gate_;
};

TEST(DeferredUpdate, WaitsLetAnotherRunGoOn) {
  for (const bool all : {false, true}) {
    Blocks blocks(1);
    test::Gate gate;
    std::vector<DeferredUpdate::Part> parts = blocks.parts({0});
    parts.front().lender = std::make_unique<HeldLender>(std::exchange(parts.front().plan, StepPlan()), gate);
    DeferredUpdate update(std::move(parts), pool(1), 1.0F);
    test::expect_pause([&] { all ? update.wait_all() : update.wait(0); }, [&] { gate.open(); });
  }
}

TEST(DeferredUpdate, BorrowsWhatItNeedsAndTellsWhatComesNext) {
  Blocks wanted(3);
  wanted.update_now(1.0F);
  Blocks blocks(3);
  std::vector<std::string> log;
  DeferredUpdate update(lent(blocks, log, -1, ScriptedLender::Fails::kNever), pool(1), 1.0F);
  update.wait_all();
  EXPECT_EQ(blocks.differences(wanted), 0);
  EXPECT_GT(update.bytes(), 0);
  EXPECT_EQ(log, (std::vector<std::string>{"expect 0", "expect 1", "borrow 0", "give back 0", "expect 1", "expect 2",
                                           "borrow 1", "give back 1", "expect 2", "borrow 2", "give back 2"}));
}

TEST(DeferredUpdate, WhatCannotBeLentEndsItAndWhoeverWaitsIsTold) {
  for (const auto fails : {ScriptedLender::Fails::kBorrow, ScriptedLender::Fails::kGiveBack}) {
    Blocks blocks(3);
    std::vector<std::string> log;
    DeferredUpdate update(lent(blocks, log, 1, fails), pool(1), 1.0F);
    EXPECT_THROW(update.wait_all(), SpillError);
    EXPECT_THROW(update.wait_all(), SpillError);
    update.wait(0);
    EXPECT_TRUE(update.finished(0));
    for (const std::int32_t block : {1, 2}) {
      EXPECT_THROW(update.wait(block), SpillError);
      EXPECT_FALSE(update.finished(block));
    }
    EXPECT_EQ(std::count(log.begin(), log.end(), "borrow 2"), 0);
  }
}

}  // namespace
}  // namespace hydra
