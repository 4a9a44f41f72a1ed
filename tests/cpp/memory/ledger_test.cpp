#include "csrc/memory/ledger.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <latch>
#include <random>
#include <thread>
#include <vector>

namespace hydra {
namespace {

using enum MemoryClass;

TEST(Ledger, RefusesWhatWouldPassTheLimitAndKeepsItsCounts) {
  Ledger ledger(100);
  ASSERT_TRUE(ledger.try_charge(kWeights, 60));
  EXPECT_FALSE(ledger.try_charge(kActivations, 41));
  EXPECT_EQ(ledger.in_use(), 60);
  EXPECT_EQ(ledger.in_use(kActivations), 0);
  EXPECT_EQ(ledger.peak(), 60);
  EXPECT_EQ(ledger.take_activation_peak(), 0);
}

TEST(Ledger, IsFilledToTheLastByte) {
  Ledger ledger(100);
  EXPECT_TRUE(ledger.try_charge(kWeights, 60));
  EXPECT_TRUE(ledger.try_charge(kBuffers, 40));
  EXPECT_FALSE(ledger.try_charge(kGradients, 1));
}

TEST(Ledger, ChargesNothingEvenWhenFull) {
  Ledger ledger(10);
  ASSERT_TRUE(ledger.try_charge(kWeights, 10));
  ledger.set_limit(5);
  EXPECT_TRUE(ledger.try_charge(kWeights, 0));
}

TEST(Ledger, WithoutALimitTakesHugeChargesWithoutOverflow) {
  Ledger ledger;
  EXPECT_TRUE(ledger.try_charge(kWeights, Ledger::kUnlimited - 1));
  EXPECT_FALSE(ledger.try_charge(kWeights, 2));
  EXPECT_TRUE(ledger.try_charge(kWeights, 1));
}

TEST(Ledger, ALowerLimitTakesNothingBackAndRefusesNewCharges) {
  Ledger ledger(100);
  ASSERT_TRUE(ledger.try_charge(kWeights, 80));
  ledger.set_limit(50);
  EXPECT_EQ(ledger.in_use(), 80);
  EXPECT_FALSE(ledger.try_charge(kWeights, 1));
  ledger.discharge(kWeights, 40);
  EXPECT_TRUE(ledger.try_charge(kWeights, 10));
}

TEST(Ledger, MovingChangesClassesButNotTheTotal) {
  Ledger ledger(100);
  ASSERT_TRUE(ledger.try_charge(kActivations, 30));
  ledger.move(kActivations, kGradients, 20);
  EXPECT_EQ(ledger.in_use(), 30);
  EXPECT_EQ(ledger.in_use(kActivations), 10);
  EXPECT_EQ(ledger.in_use(kGradients), 20);
}

TEST(Ledger, TellsTheUseByClassAtThePeak) {
  Ledger ledger(1000);
  ASSERT_TRUE(ledger.try_charge(kWeights, 100));
  ASSERT_TRUE(ledger.try_charge(kActivations, 200));
  ASSERT_TRUE(ledger.try_charge(kGradients, 50));
  ledger.discharge(kActivations, 200);
  ASSERT_TRUE(ledger.try_charge(kBuffers, 10));
  const MemoryUse use = ledger.at_peak();
  EXPECT_EQ(use.total, 350);
  EXPECT_EQ(use.by_class, (std::array<Bytes, kMemoryClasses>{100, 50, 200, 0, 0}));
  ledger.reset_peak();
  EXPECT_EQ(ledger.peak(), 160);
  EXPECT_EQ(ledger.at_peak().by_class, (std::array<Bytes, kMemoryClasses>{100, 50, 0, 10, 0}));
}

TEST(Ledger, TheActivationPeakLeavesOutWeightsAndGradientsAndRestartsAtTheUseNow) {
  Ledger ledger(1000);
  ASSERT_TRUE(ledger.try_charge(kWeights, 500));
  ASSERT_TRUE(ledger.try_charge(kBuffers, 10));
  ASSERT_TRUE(ledger.try_charge(kActivations, 70));
  ASSERT_TRUE(ledger.try_charge(kGradients, 50));
  ledger.discharge(kActivations, 50);
  EXPECT_EQ(ledger.take_activation_peak(), 80);
  EXPECT_EQ(ledger.take_activation_peak(), 30);
}

TEST(Ledger, MovingIntoActivationsCountsForTheirPeak) {
  Ledger ledger(1000);
  ASSERT_TRUE(ledger.try_charge(kGradients, 50));
  ledger.move(kGradients, kActivations, 50);
  ledger.discharge(kActivations, 50);
  EXPECT_EQ(ledger.take_activation_peak(), 50);
}

TEST(Ledger, APeakThatIsTakenStartsAgainAtTheUseNowAndLeavesTheOtherAlone) {
  Ledger ledger(1000);
  EXPECT_TRUE(ledger.try_charge(MemoryClass::kWeights, 300));
  EXPECT_TRUE(ledger.try_charge(MemoryClass::kActivations, 500));
  ledger.discharge(MemoryClass::kActivations, 500);
  EXPECT_EQ(ledger.take_peak(), 800);
  EXPECT_EQ(ledger.take_peak(), 300);
  EXPECT_TRUE(ledger.try_charge(MemoryClass::kGradients, 100));
  ledger.discharge(MemoryClass::kGradients, 100);
  EXPECT_EQ(ledger.take_peak(), 400);
  EXPECT_EQ(ledger.peak(), 800);
}

TEST(Ledger, NamesItsClasses) {
  EXPECT_STREQ(name(kWeights), "weights");
  EXPECT_STREQ(name(kBuffers), "buffers");
}

TEST(Ledger, NeverPassesTheLimitUnderEightThreadsAndCountsExactlyAfterwards) {
  constexpr int kThreads = 8;
  constexpr Bytes kLimit = 310;
  Ledger ledger(kLimit);
  std::latch start(kThreads);
  std::atomic<Bytes> held{0};  // bytes of successful charges: an oracle beside the ledger
  std::atomic<Bytes> most_held{0};
  std::array<std::array<Bytes, kMemoryClasses>, kThreads> kept{};
  const auto work = [&](std::size_t thread) {
    std::mt19937 random(static_cast<std::uint32_t>(thread));
    start.arrive_and_wait();
    for (int i = 0; i < 20000; ++i) {
      const Bytes bytes = 1 + static_cast<Bytes>(random() % 300);
      const auto cls = static_cast<MemoryClass>(random() % kMemoryClasses);
      if (!ledger.try_charge(cls, bytes)) {
        continue;
      }
      const Bytes now = held.fetch_add(bytes) + bytes;
      Bytes most = most_held.load();
      while (now > most && !most_held.compare_exchange_weak(most, now)) {
      }
      held.fetch_sub(bytes);
      ledger.discharge(cls, bytes);
    }
    // The final charges have to be right, class by class.
    const auto last = static_cast<std::size_t>(random() % kMemoryClasses);
    if (ledger.try_charge(static_cast<MemoryClass>(last), 7)) {
      kept[thread][last] = 7;
    }
  };
  std::vector<std::jthread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back(work, thread);
  }
  threads.clear();
  EXPECT_LE(most_held.load(), kLimit);
  EXPECT_LE(ledger.peak(), kLimit);
  EXPECT_GE(ledger.peak(), most_held.load());
  Bytes total = 0;
  for (std::size_t cls = 0; cls < kMemoryClasses; ++cls) {
    Bytes expected = 0;
    for (const auto& of_thread : kept) {
      expected += of_thread[cls];
    }
    EXPECT_EQ(ledger.in_use(static_cast<MemoryClass>(cls)), expected);
    total += expected;
  }
  EXPECT_EQ(ledger.in_use(), total);
}

TEST(Ledger, ALimitOfOneIsHeldByOneOfEightThreadsAtATime) {
  // At the limit all the time, so that a check apart from its charge is seen.
  Ledger ledger(1);
  std::latch start(8);
  std::atomic<int> holders{0};
  std::atomic<int> most{0};
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      for (int i = 0; i < 200000; ++i) {
        if (ledger.try_charge(kWeights, 1)) {
          if (holders.fetch_add(1) > 0) {
            most.store(2);
          }
          holders.fetch_sub(1);
          ledger.discharge(kWeights, 1);
        }
      }
    });
  }
  threads.clear();
  EXPECT_EQ(most.load(), 0);
  EXPECT_EQ(ledger.peak(), 1);
  EXPECT_EQ(ledger.in_use(), 0);
}

TEST(Ledger, EightThreadsThatChargeUnitsGetExactlyAsManyAsFit) {
  constexpr Bytes kLimit = 12345;
  Ledger ledger(kLimit);
  std::latch start(8);
  std::atomic<Bytes> granted{0};
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      for (int i = 0; i < 4000; ++i) {
        granted.fetch_add(ledger.try_charge(kActivations, 1) ? 1 : 0);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(granted.load(), kLimit);
  EXPECT_EQ(ledger.in_use(), kLimit);
  EXPECT_EQ(ledger.in_use(kActivations), kLimit);
  EXPECT_EQ(ledger.peak(), kLimit);
  EXPECT_EQ(ledger.take_activation_peak(), kLimit);
}

TEST(Ledger, TellsWorkspaceFromTheActivationsHeldAtTheBoundary) {
  Ledger ledger(1000);
  ASSERT_TRUE(ledger.try_charge(kActivations, 300));
  ledger.take_activation_peak();
  ASSERT_TRUE(ledger.try_charge(kActivations, 50));
  ledger.discharge(kActivations, 50);
  EXPECT_EQ(ledger.at_peak().workspace, 50);
  EXPECT_EQ(ledger.at_peak().by_class[2], 350);
  ledger.discharge(kActivations, 300);
}

}  // namespace
}  // namespace hydra
