// The pager over the simulated device: slots always have the host's bytes, and never exceed the budget.
#include "csrc/paging/pager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "csrc/base/errors.h"
#include "csrc/memory/limited_resource.h"
#include "csrc/testing/fault_script.h"
#include "csrc/transfer/simulated_device.h"
#include "tests/cpp/paging/pager_support.h"

namespace hydra::test {
namespace {

using testing::FaultScript;
using testing::Operation;

class PagerTest : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr Bytes kBlock = 1024;

  void make(std::int32_t blocks, Bytes budget, PagerOptions options = {}) {
    SimulatedDeviceOptions simulated;
    simulated.asynchronous = GetParam();
    simulated.faults = faults_;
    device_ = std::make_unique<SimulatedDevice>(simulated);
    ledger_ = std::make_unique<Ledger>(budget);
    slots_ = std::make_unique<LimitedResource>(device_->slots(), *ledger_, MemoryClass::kWeights);
    pager_ = std::make_unique<Pager>(*device_, *slots_, *ledger_, std::move(options));
    for (std::int32_t i = 0; i < blocks; ++i) {
      auto client = std::make_unique<FakeBlock>(random_bytes(kBlock, static_cast<std::uint32_t>(i + 1)));
      blocks_.push_back(client.get());
      pager_->add_block("block " + std::to_string(i), kBlock, std::move(client));
    }
  }

  void TearDown() override {
    if (pager_) {
      pager_->close();
      EXPECT_EQ(ledger_->in_use(), 0);
      EXPECT_EQ(device_->hazards(), 0) << device_->first_hazard();
    }
  }

  void visit(std::int32_t block) {
    pager_->passes().arrive(block);
    EXPECT_TRUE(blocks_[static_cast<std::size_t>(block)]->equal());
    EXPECT_LE(ledger_->in_use(), ledger_->limit());
    pager_->release(block, AcquireReason::kHook);
  }

  void step(std::int32_t blocks) {
    pager_->passes().begin(PassKind::kForward);
    for (std::int32_t i = 0; i < blocks; ++i) {
      visit(i);
    }
    pager_->passes().end(true);
    pager_->passes().begin(PassKind::kBackward);
    for (std::int32_t i = blocks; i-- > 0;) {
      visit(i);
    }
    pager_->passes().end(true);
  }

  std::shared_ptr<FaultScript> faults_ = std::make_shared<FaultScript>();
  std::unique_ptr<SimulatedDevice> device_;
  std::unique_ptr<Ledger> ledger_;
  std::unique_ptr<LimitedResource> slots_;
  std::unique_ptr<Pager> pager_;
  std::vector<FakeBlock*> blocks_;
};

INSTANTIATE_TEST_SUITE_P(Modes, PagerTest, ::testing::Bool(),
                         [](const auto& mode) { return mode.param ? "Asynchronous" : "Plain"; });

TEST_P(PagerTest, BringsABlockInWhenItIsNeededAndOutWhenRoomIs) {
  make(3, 2 * kBlock);
  visit(0);
  visit(1);
  visit(2);
  EXPECT_FALSE(blocks_[0]->readable());
  EXPECT_TRUE(blocks_[2]->readable());
  EXPECT_EQ(pager_->statistics().evictions, 1);
}

TEST_P(PagerTest, LoadsTwiceTheBlocksLessTheSlotsOnceItKnowsTheOrder) {
  constexpr std::int32_t kBlocks = 6;
  for (Bytes slots = 1; slots <= kBlocks; ++slots) {
    make(kBlocks, slots * kBlock);
    step(kBlocks);
    step(kBlocks);
    for (std::int32_t i = 0; i < kBlocks; ++i) {
      pager_->contents().invalidate(i);  // the optimizer wrote
    }
    const PagerStatistics before = pager_->statistics();
    step(kBlocks);
    EXPECT_EQ(pager_->statistics().loads - before.loads, 2 * kBlocks - slots) << slots << " slots";
    EXPECT_EQ(pager_->statistics().loaded_bytes - before.loaded_bytes, (2 * kBlocks - slots) * kBlock);
    EXPECT_EQ(pager_->statistics().spills, 0);
    EXPECT_EQ(pager_->statistics().faults, 0);
    TearDown();
    pager_.reset();
    blocks_.clear();
  }
}

TEST_P(PagerTest, EvictsWhatIsNeededLastWhereAllFit) {
  constexpr std::int32_t kBlocks = 6;
  for (std::int32_t now = 1; now < kBlocks - 1; ++now) {
    make(kBlocks, kBlocks * kBlock);
    step(kBlocks);
    step(kBlocks);
    pager_->passes().begin(PassKind::kForward);
    for (std::int32_t i = 0; i <= now; ++i) {
      visit(i);
    }
    EXPECT_TRUE(pager_->evict_one());
    EXPECT_FALSE(blocks_[0]->readable()) << "the backward needs it last; now at " << now;
    for (std::int32_t i = now + 1; i < kBlocks; ++i) {
      visit(i);
    }
    pager_->passes().end(true);
    pager_->passes().begin(PassKind::kBackward);
    for (std::int32_t i = kBlocks; i-- > now;) {
      visit(i);
    }
    EXPECT_TRUE(pager_->evict_one());
    EXPECT_FALSE(blocks_[kBlocks - 1]->readable()) << "the next forward needs it last; now at " << now;
    EXPECT_EQ(pager_->statistics().evictions, 2);
    TearDown();
    pager_.reset();
    blocks_.clear();
  }
}

TEST_P(PagerTest, FetchesAheadWhatLosesItsBytesWhereAllFit) {
  make(4, 4 * kBlock);
  step(4);
  step(4);
  pager_->passes().begin(PassKind::kForward);
  visit(0);
  pager_->contents().invalidate(3);
  const std::int64_t before = pager_->statistics().prefetched;
  visit(1);
  EXPECT_EQ(pager_->statistics().prefetched, before + 1);
  visit(2);
  visit(3);
  pager_->passes().end(true);
}

TEST_P(PagerTest, LeavesRoomForGradientsThatLeaveWhileABlockIsInUse) {
  constexpr std::int32_t kBlocks = 6;
  constexpr Bytes kSlots = 4;
  make(kBlocks, kSlots * kBlock);
  for (int step = 0; step < 3; ++step) {
    pager_->passes().begin(PassKind::kForward);
    for (std::int32_t i = 0; i < kBlocks; ++i) {
      visit(i);
    }
    pager_->passes().end(true);
    EXPECT_EQ(pager_->resident_bytes(), kSlots * kBlock);
    pager_->passes().begin(PassKind::kBackward);
    for (std::int32_t i = kBlocks; i-- > 0;) {
      const bool gradients = i + 1 < kBlocks;  // those of the block before
      pager_->passes().arrive(i);
      pager_->passes().note_leaving(gradients ? kBlock : 0);
      EXPECT_EQ(pager_->resident_bytes(), (gradients && step > 0 ? kSlots - 1 : kSlots) * kBlock) << "block " << i;
      pager_->release(i, AcquireReason::kHook);
    }
    pager_->passes().end(true);
    for (const auto& [block, room] : pager_->passes().recorded(PassKind::kBackward)) {
      EXPECT_EQ(room, block + 1 < kBlocks ? kBlock : 0) << "block " << block;
    }
  }
}

TEST_P(PagerTest, EvictsNothingWithRoomForAllAndReloadsOnlyWhatChanged) {
  make(4, 4 * kBlock);
  step(4);
  blocks_[2]->host()[5] ^= 1;
  pager_->contents().invalidate(2);
  EXPECT_FALSE(blocks_[2]->readable());
  const PagerStatistics before = pager_->statistics();
  step(4);
  EXPECT_EQ(pager_->statistics().loads - before.loads, 1);
  EXPECT_EQ(pager_->statistics().evictions, 0);
}

TEST_P(PagerTest, TakesWhatIsNeededLastFromThoseThatThePlanWants) {
  make(4, 4 * kBlock);
  step(4);
  step(4);
  pager_->passes().begin(PassKind::kForward);
  visit(0);
  EXPECT_TRUE(pager_->evict_one());
  EXPECT_EQ(pager_->state(3), BlockState::kAbsent);
  for (std::int32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(pager_->state(i), BlockState::kPresent) << "block " << i;
  }
  pager_->passes().end(false);
}

TEST_P(PagerTest, HasFilledAllItBeganWhenAPassEnds) {
  make(4, 4 * kBlock);
  step(4);
  step(4);
  for (std::int32_t i = 0; i < 4; ++i) {
    pager_->contents().invalidate(i);
    blocks_[static_cast<std::size_t>(i)]->filled = 0;
  }
  faults_->jitter(Operation::kToDevice, 0.02, 1);
  pager_->passes().begin(PassKind::kForward);
  visit(0);
  pager_->passes().end(false);
  for (FakeBlock* const block : blocks_) {
    EXPECT_EQ(block->filled, 1) << "an optimizer may write the host from now on";
  }
}

TEST_P(PagerTest, InvalidatesABlockThatIsOnItsWay) {
  make(2, 2 * kBlock);
  step(2);
  step(2);
  pager_->contents().invalidate(0);
  pager_->contents().invalidate(1);
  pager_->passes().begin(PassKind::kForward);
  pager_->passes().arrive(0);
  EXPECT_EQ(pager_->state(1), BlockState::kLoading);
  pager_->contents().invalidate(1);
  EXPECT_EQ(pager_->state(1), BlockState::kStale);
  blocks_[1]->host()[5] ^= 1;
  pager_->release(0, AcquireReason::kHook);
  visit(1);
  pager_->passes().end(true);
}

TEST_P(PagerTest, WritesBackWhatComputeHasWritten) {
  make(1, kBlock);
  pager_->acquire(0, AcquireReason::kFault);
  device_->note_write(blocks_[0]->slot(), kBlock);
  pager_->contents().mark_dirty(0);
  pager_->release(0, AcquireReason::kFault);
  pager_->contents().write_back_dirty();
  EXPECT_EQ(device_->hazards(), 0) << device_->first_hazard();
}

TEST_P(PagerTest, NeverTakesAPinnedBlock) {
  make(3, 2 * kBlock);
  pager_->acquire(0, AcquireReason::kHook);
  pager_->acquire(1, AcquireReason::kHook);
  EXPECT_THROW(pager_->acquire(2, AcquireReason::kHook), OutOfMemory);
  EXPECT_EQ(pager_->pins(), 2);
  EXPECT_FALSE(pager_->evict_one());
  pager_->release(0, AcquireReason::kHook);
  pager_->acquire(2, AcquireReason::kHook);
  EXPECT_TRUE(blocks_[1]->equal());
  EXPECT_TRUE(blocks_[2]->equal());
  pager_->release(1, AcquireReason::kHook);
  pager_->release(2, AcquireReason::kHook);
}

TEST_P(PagerTest, MakesRoomForTheAllocationsOfOthers) {
  make(2, 2 * kBlock);
  visit(0);
  visit(1);
  EXPECT_FALSE(ledger_->try_charge(MemoryClass::kActivations, kBlock));
  EXPECT_TRUE(pager_->evict_one());
  EXPECT_TRUE(ledger_->try_charge(MemoryClass::kActivations, kBlock));
  EXPECT_EQ(pager_->statistics().spills, 1);
  ledger_->discharge(MemoryClass::kActivations, kBlock);
}

TEST_P(PagerTest, RelievesBeforeItEvicts) {
  int relieved = 0;
  make(1, kBlock, {.relief = {.reliever = [&] { return ++relieved == 1; }}});
  visit(0);
  EXPECT_EQ(relieved, 0);
  EXPECT_TRUE(pager_->evict_one());
  EXPECT_TRUE(blocks_[0]->readable());
  EXPECT_TRUE(pager_->evict_one());
  EXPECT_FALSE(blocks_[0]->readable());
}

TEST_P(PagerTest, CountsAFault) {
  make(1, kBlock);
  pager_->acquire(0, AcquireReason::kFault);
  pager_->release(0, AcquireReason::kFault);
  EXPECT_EQ(pager_->statistics().faults, 1);
  pager_->acquire(0, AcquireReason::kFault);
  pager_->release(0, AcquireReason::kFault);
  EXPECT_EQ(pager_->statistics().faults, 1) << "present: no fault";
}

TEST_P(PagerTest, RefusesAFaultWhenThePathIsOff) {
  make(1, kBlock, {.fault_path = false});
  EXPECT_THROW(pager_->acquire(0, AcquireReason::kFault), PageFaultError);
  EXPECT_EQ(pager_->pins(), 0);
  visit(0);
  pager_->acquire(0, AcquireReason::kFault);  // present: no fault
  pager_->release(0, AcquireReason::kFault);
  pager_->contents().invalidate(0);
  EXPECT_THROW(pager_->acquire(0, AcquireReason::kFault), PageFaultError);
  EXPECT_EQ(pager_->pins(), 0);
}

TEST_P(PagerTest, WritesADirtyBlockBackBeforeItCanGo) {
  make(2, kBlock);
  pager_->acquire(0, AcquireReason::kHook);
  blocks_[0]->slot()[7] = 99;
  pager_->contents().mark_dirty(0);
  EXPECT_THROW(pager_->acquire(1, AcquireReason::kHook), OutOfMemory) << "pinned: it may be written still";
  EXPECT_NE(blocks_[0]->host()[7], 99);
  pager_->release(0, AcquireReason::kHook);
  visit(1);
  EXPECT_EQ(blocks_[0]->host()[7], 99);
  EXPECT_EQ(pager_->statistics().write_backs, 1);
}

TEST_P(PagerTest, KeepsABlockDirtyThatIsWrittenWhileItGoesHome) {
  make(1, kBlock);
  pager_->acquire(0, AcquireReason::kHook);
  pager_->contents().mark_dirty(0);
  pager_->release(0, AcquireReason::kHook);
  blocks_[0]->during_write_back = [this] { pager_->contents().mark_dirty(0); };
  pager_->contents().write_back_dirty();
  EXPECT_EQ(pager_->statistics().write_backs, 1);
  blocks_[0]->during_write_back = nullptr;
  EXPECT_TRUE(pager_->evict_one());
  EXPECT_EQ(pager_->statistics().write_backs, 2) << "written since: it has to go home again";
}

TEST_P(PagerTest, WaitsForEveryWriteBackEvenIfOneFails) {
  make(2, 2 * kBlock);
  for (std::int32_t block = 0; block < 2; ++block) {
    pager_->acquire(block, AcquireReason::kHook);
    pager_->contents().mark_dirty(block);
    pager_->release(block, AcquireReason::kHook);
  }
  faults_->fail(Operation::kToHost, 1, false);
  std::atomic<bool> home{false};
  blocks_[1]->during_write_back = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    home = true;
  };
  EXPECT_THROW(pager_->contents().write_back_dirty(), TransferError);
  EXPECT_TRUE(home) << "the host may be written from now on, and the lane writes it still";
  const std::int64_t before = pager_->statistics().write_backs;
  EXPECT_TRUE(pager_->evict_one());
  EXPECT_EQ(pager_->state(1), BlockState::kAbsent);
  EXPECT_EQ(pager_->statistics().write_backs, before);
  EXPECT_TRUE(pager_->evict_one());
  EXPECT_EQ(pager_->statistics().write_backs, before + 1) << "block 0 is dirty still";
}

TEST_P(PagerTest, SurvivesEveryFailingTransferAndRetries) {
  make(3, 2 * kBlock);
  for (std::int64_t nth = 1; nth <= 6; ++nth) {
    faults_->reset();
    faults_->fail(Operation::kToDevice, nth, false);
    for (std::int32_t block = 0; block < 3; ++block) {
      try {
        visit(block);
      } catch (const TransferError&) {
        EXPECT_EQ(pager_->pins(), 0);
        EXPECT_FALSE(blocks_[static_cast<std::size_t>(block)]->readable());
        visit(block);
      }
    }
    for (std::int32_t block = 0; block < 3; ++block) {
      pager_->contents().invalidate(block);
    }
  }
}

TEST_P(PagerTest, SurvivesARefusedSlot) {
  make(2, 2 * kBlock);
  faults_->fail(Operation::kSlot, 1, false);
  EXPECT_THROW(pager_->passes().arrive(0), OutOfMemory);
  EXPECT_EQ(pager_->pins(), 0);
  EXPECT_EQ(ledger_->in_use(), 0);
  visit(0);
}

TEST_P(PagerTest, AsksForMemoryAheadUntilItIsRefusedAndAgainAtTheNextUse) {
  make(6, 4 * kBlock);
  step(6);
  while (pager_->evict_one()) {
  }
  pager_->acquire(5, AcquireReason::kFault);  // has a slot that the plan wants for others
  pager_->release(5, AcquireReason::kFault);
  const std::int64_t asked = faults_->count(Operation::kSlot);
  faults_->fail(Operation::kSlot, 1, true);
  pager_->passes().begin(PassKind::kForward);
  EXPECT_EQ(faults_->count(Operation::kSlot), asked + 1);
  EXPECT_EQ(pager_->state(5), BlockState::kAbsent) << "its slot went to a block that the plan wants";
  visit(0);
  EXPECT_EQ(faults_->count(Operation::kSlot), asked + 2);
  faults_->reset();
  for (std::int32_t block = 1; block < 6; ++block) {
    visit(block);
  }
  pager_->passes().end(true);
}

TEST_P(PagerTest, ForgetsNothingWhenTheOrderChangesEveryStep) {
  make(5, 3 * kBlock);
  std::vector<std::int32_t> order = {0, 1, 2, 3, 4};
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    pager_->passes().begin(PassKind::kForward);
    for (const std::int32_t block : order) {
      visit(block);
    }
    pager_->passes().end(true);
  }
  EXPECT_GT(pager_->statistics().order_changes, 0);
}

TEST_P(PagerTest, ServesManyThreadsAtOnce) {
  make(4, 4 * kBlock);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 200; ++i) {
        const auto block = static_cast<std::int32_t>(random() % 4);
        pager_->acquire(block, AcquireReason::kFault);
        wrong += blocks_[static_cast<std::size_t>(block)]->equal() ? 0 : 1;
        pager_->release(block, AcquireReason::kFault);
        if (i % 16 == 0) {
          pager_->evict_one();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(pager_->pins(), 0);
}

}  // namespace
}  // namespace hydra::test
