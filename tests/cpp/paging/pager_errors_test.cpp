// The pager when a call fails that should not: the process survives, its counts stay right, and the pager continues.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "csrc/base/errors.h"
#include "csrc/memory/limited_resource.h"
#include "csrc/paging/pager.h"
#include "csrc/testing/fault_script.h"
#include "csrc/transfer/simulated_device.h"
#include "tests/cpp/paging/pager_support.h"

namespace hydra::test {
namespace {

using testing::FaultScript;
using testing::Operation;
constexpr Bytes kErrorBlock = 1024;

/// A simulated device that fails to record a fence on request, as without host memory for one. Its waits can be
/// replaced, as by a device whose compute waits without the host.
class Forgetful final : public DeviceBackend {
 public:
  explicit Forgetful(SimulatedDeviceOptions options) : device_(std::move(options)) {}

  std::string name() const override { return device_.name(); }
  Resource& slots() noexcept override { return device_.slots(); }
  Lane& to_device() noexcept override { return device_.to_device(); }
  Lane& to_host() noexcept override { return device_.to_host(); }
  FencePtr record() override {
    if (forgetful) {
      throw std::bad_alloc();
    }
    return device_.record();
  }
  void compute_waits(Ticket& ticket) override { on_wait ? on_wait(ticket) : device_.compute_waits(ticket); }
  void slot_returns(Ticket* ticket, const std::vector<FencePtr>& fences) noexcept override {
    returned += 1;
    on_return ? on_return(ticket) : device_.slot_returns(ticket, fences);
  }
  void note_read(const void* pointer, Bytes bytes) override { device_.note_read(pointer, bytes); }

  std::int64_t hazards() const { return device_.hazards(); }

  std::function<void(Ticket&)> on_wait;
  std::function<void(Ticket*)> on_return;
  std::atomic<bool> forgetful{false};
  std::atomic<int> returned{0};

 private:
  SimulatedDevice device_;
};

class PagerErrors : public ::testing::Test {
 protected:
  PagerErrors() {
    for (std::int32_t i = 0; i < 3; ++i) {
      auto block = std::make_unique<FakeBlock>(random_bytes(kErrorBlock, static_cast<std::uint32_t>(i + 1)));
      blocks_.push_back(block.get());
      pager_.add_block("block " + std::to_string(i), kErrorBlock, std::move(block));
    }
  }
  ~PagerErrors() override {
    pager_.close();
    EXPECT_EQ(ledger_.in_use(), 0);
    EXPECT_EQ(device_.hazards(), 0);
  }

  void visit(std::int32_t block) {
    pager_.passes().arrive(block);
    EXPECT_TRUE(blocks_[static_cast<std::size_t>(block)]->equal());
    pager_.release(block, AcquireReason::kHook);
  }

  static SimulatedDeviceOptions options(std::shared_ptr<FaultScript> faults) {
    SimulatedDeviceOptions options;
    options.asynchronous = true;
    options.faults = std::move(faults);
    return options;
  }

  PagerOptions pager_options() {
    PagerOptions options;
    options.relief.reliever = [this] { return reliever_ && reliever_(); };
    options.activations.meter = [this] { return meter_ ? meter_() : ledger_.take_activation_peak(); };
    return options;
  }

  /// From now on a fill of block 0 stays under way until `end_` is open; `copied_` opens when its bytes are copied.
  void delay_fills() {
    blocks_[0]->during_fill = [this] {
      copied_.open();
      end_.wait();
    };
  }

  std::shared_ptr<FaultScript> faults_ = std::make_shared<FaultScript>();
  Forgetful device_{options(faults_)};
  Ledger ledger_{kErrorBlock};
  LimitedResource slots_{device_.slots(), ledger_, MemoryClass::kWeights};
  std::function<bool()> reliever_;
  std::function<Bytes()> meter_;
  Gate copied_;
  Gate end_;
  Pager pager_{device_, slots_, ledger_, pager_options()};
  std::vector<FakeBlock*> blocks_;
};

TEST_F(PagerErrors, ASlotWhoseFillHasFailedGoesOnlyInComputeOrder) {
  visit(0);
  faults_->fail(Operation::kToDevice, 1, false);
  EXPECT_THROW(visit(1), TransferError);
  EXPECT_EQ(pager_.state(1), BlockState::kStale);
  EXPECT_EQ(ledger_.in_use(), kErrorBlock) << "given back past the device, that may read it still";
  EXPECT_EQ(device_.returned, 0);
  EXPECT_TRUE(pager_.evict_one());
  EXPECT_EQ(device_.returned, 1);
  visit(1);
}

TEST_F(PagerErrors, AFillIsTriedAgainBehindTheUsesOfTheSlotsBlockBefore) {
  for (int round = 0; round < 8; ++round) {
    faults_->reset();
    visit(0);
    faults_->fail(Operation::kToDevice, 1, false);
    EXPECT_THROW(visit(1), TransferError);
    visit(1);
    EXPECT_EQ(device_.hazards(), 0);
  }
}

TEST_F(PagerErrors, AUseThatCouldNotBeRecordedIsCoveredByTheNextFence) {
  pager_.passes().arrive(0);
  device_.forgetful = true;
  pager_.release(0, AcquireReason::kHook);
  EXPECT_EQ(pager_.pins(), 0);
  EXPECT_THROW(pager_.evict_one(), std::bad_alloc);
  EXPECT_TRUE(blocks_[0]->equal()) << "nothing has changed";
  EXPECT_EQ(pager_.statistics().evictions, 0);
  device_.forgetful = false;
  visit(1);
}

TEST_F(PagerErrors, FreshMemoryIsReturnedIfNoFenceCanBeRecordedForIt) {
  device_.forgetful = true;
  EXPECT_THROW(pager_.passes().arrive(0), std::bad_alloc);
  EXPECT_EQ(ledger_.in_use(), 0);
  EXPECT_EQ(pager_.state(0), BlockState::kAbsent);
  device_.forgetful = false;
  visit(0);
}

TEST_F(PagerErrors, ASlotChangesHandsWithTheTicketOfItsFill) {
  delay_fills();
  device_.on_wait = [](Ticket&) { throw std::runtime_error("the device takes no wait"); };
  EXPECT_THROW(pager_.acquire(0, AcquireReason::kHook), std::runtime_error);
  copied_.wait();
  EXPECT_EQ(pager_.state(0), BlockState::kStale) << "its fill is under way";
  blocks_[1]->refuses_fills = true;
  EXPECT_THROW(pager_.acquire(1, AcquireReason::kHook), std::bad_alloc);
  EXPECT_EQ(pager_.state(0), BlockState::kAbsent);
  EXPECT_EQ(pager_.state(1), BlockState::kStale) << "it has the slot of block 0";
  bool waits = false;
  device_.on_return = [&](Ticket* ticket) {
    end_.open();
    if (ticket != nullptr) {
      waits = true;
      ticket->wait_quietly();
    }
  };
  EXPECT_TRUE(pager_.evict_one());
  EXPECT_TRUE(waits) << "the slot was returned while a lane fills it";
}

TEST_F(PagerErrors, APassEndsBehindTheFillOfABlockThatIsEvictedAlready) {
  delay_fills();
  device_.on_wait = [this](Ticket&) { copied_.wait(); };
  device_.on_return = [](Ticket*) {};
  pager_.passes().begin(PassKind::kForward);
  pager_.passes().arrive(0);
  pager_.release(0, AcquireReason::kHook);
  EXPECT_TRUE(pager_.evict_one());
  std::thread late([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    end_.open();
  });
  pager_.passes().end(true);
  EXPECT_EQ(blocks_[0]->filled, 1) << "the host may be written from now on, and the lane reads it still";
  late.join();
}

TEST_F(PagerErrors, ABlockIsPresentOnceAcquiredEvenIfItsHostChangesMeanwhile) {
  delay_fills();
  device_.on_wait = [this](Ticket&) { copied_.wait(); };
  pager_.acquire(0, AcquireReason::kHook);
  pager_.release(0, AcquireReason::kHook);
  int waits = 0;
  device_.on_wait = [&](Ticket& ticket) {
    if (++waits == 1) {
      pager_.contents().invalidate(0);
    } else {
      end_.open();
      ticket.wait();
    }
  };
  pager_.acquire(0, AcquireReason::kHook);
  EXPECT_EQ(pager_.state(0), BlockState::kPresent);
  EXPECT_TRUE(blocks_[0]->equal());
  pager_.release(0, AcquireReason::kHook);
  end_.open();
  device_.on_wait = nullptr;
}

TEST_F(PagerErrors, APassWhoseMeterFailsEndsAndIsNotPlannedBy) {
  pager_.passes().begin(PassKind::kForward);
  visit(0);
  meter_ = []() -> Bytes { throw std::runtime_error("no device"); };
  pager_.passes().end(true);
  EXPECT_TRUE(pager_.passes().recorded(PassKind::kForward).empty());
  meter_ = nullptr;
  pager_.passes().begin(PassKind::kForward);
  visit(0);
  visit(1);
  pager_.passes().end(true);
  EXPECT_EQ(pager_.passes().recorded(PassKind::kForward).size(), 2U);
}

TEST_F(PagerErrors, ClosesWithoutHostMemoryForAFence) {
  pager_.acquire(0, AcquireReason::kFault);
  pager_.release(0, AcquireReason::kFault);
  device_.forgetful = true;
  pager_.close();
  EXPECT_EQ(ledger_.in_use(), 0);
}

TEST_F(PagerErrors, AReservationCountsWhatAnotherThreadGivesBack) {
  visit(0);
  ASSERT_EQ(ledger_.in_use(), ledger_.limit());
  device_.on_return = [this](Ticket* /*ticket*/) {
    copied_.open();
    end_.wait();
  };
  const std::jthread other([this] { EXPECT_TRUE(pager_.evict_one()); });
  copied_.wait();
  reliever_ = [this] {
    end_.open();  // the ledger was full when the reservation looked
    return false;
  };
  visit(1);
}

TEST_F(PagerErrors, AThreadThatIsAboutToGetABlockGivesUpWhenThePagerCloses) {
  ASSERT_TRUE(ledger_.try_charge(MemoryClass::kActivations, kErrorBlock));
  Gate waiting;
  Gate closed;
  reliever_ = [&] {
    waiting.open();
    closed.wait();
    return true;  // there is room now
  };
  std::string said;
  std::thread late([&] {
    try {
      pager_.acquire(0, AcquireReason::kHook);
    } catch (const StateError& error) {
      said = error.what();
    }
  });
  waiting.wait();
  EXPECT_EQ(pager_.state(0), BlockState::kReserving);
  pager_.close();
  ledger_.discharge(MemoryClass::kActivations, kErrorBlock);
  closed.open();
  late.join();
  EXPECT_EQ(said, "the offload context of this model has ended");
  EXPECT_EQ(ledger_.in_use(), 0);
  EXPECT_EQ(pager_.pins(), 0);
  EXPECT_FALSE(blocks_[0]->readable());
  EXPECT_THROW(pager_.passes().arrive(1), StateError);
}

}  // namespace
}  // namespace hydra::test
