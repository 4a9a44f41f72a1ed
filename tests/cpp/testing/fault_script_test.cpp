#include "csrc/testing/fault_script.h"

#include <gtest/gtest.h>

#include "csrc/base/errors.h"
#include "csrc/transfer/simulated_device.h"
#include "tests/cpp/support.h"

namespace hydra::testing {
namespace {

using test::copy_job;
using test::message_of;
using test::random_bytes;

class FaultScriptTest : public ::testing::Test {
 protected:
  std::string copy_to_device() {
    const TicketPtr ticket = device_.to_device().submit(copy_job(target_.data(), source_));
    return message_of(*ticket);
  }

  std::shared_ptr<FaultScript> script_ = std::make_shared<FaultScript>();
  SimulatedDevice device_{{.faults = script_}};
  const std::vector<std::uint8_t> source_ = random_bytes(500, 1);
  std::vector<std::uint8_t> target_ = std::vector<std::uint8_t>(500);
};

TEST_F(FaultScriptTest, FailsTheNthOperationOnlyAndARetrySucceeds) {
  script_->fail(Operation::kToDevice, 2, false);
  EXPECT_EQ(copy_to_device(), "");
  target_.assign(500, 0);
  EXPECT_EQ(copy_to_device(), "scripted fault: copy 2 to the device was told to fail");
  EXPECT_EQ(target_, std::vector<std::uint8_t>(500, 0));
  EXPECT_EQ(copy_to_device(), "");
  EXPECT_EQ(target_, source_);
  EXPECT_EQ(script_->count(Operation::kToDevice), 3);
  EXPECT_EQ(device_.to_device().statistics().failures, 1);
}

TEST_F(FaultScriptTest, FailsEveryLaterOperationWhenPersistentUntilReset) {
  script_->fail(Operation::kToDevice, 2, true);
  EXPECT_EQ(copy_to_device(), "");
  EXPECT_NE(copy_to_device(), "");
  EXPECT_NE(copy_to_device(), "");
  script_->reset();
  EXPECT_EQ(copy_to_device(), "");
  EXPECT_EQ(script_->count(Operation::kToDevice), 1);
}

TEST_F(FaultScriptTest, CountsEachKindOfOperationForItself) {
  script_->fail(Operation::kToHost, 1, false);
  EXPECT_EQ(copy_to_device(), "");
  const TicketPtr back = device_.to_host().submit(copy_job(target_.data(), source_));
  EXPECT_THROW(back->wait(), TransferError);
  EXPECT_EQ(script_->count(Operation::kToHost), 1);
  EXPECT_EQ(script_->count(Operation::kToDevice), 1);
  EXPECT_EQ(script_->count(Operation::kSlot), 0);
}

TEST_F(FaultScriptTest, RefusesASlotAsOutOfMemory) {
  script_->fail(Operation::kSlot, 2, false);
  void* const first = device_.slots().allocate(100);
  EXPECT_THROW(device_.slots().allocate(100), OutOfMemory);
  void* const third = device_.slots().allocate(100);
  EXPECT_EQ(script_->count(Operation::kSlot), 3);
  device_.slots().release(first, 100);
  device_.slots().release(third, 100);
}

TEST_F(FaultScriptTest, AddsUpRulesOfOneKind) {
  script_->fail(Operation::kToDevice, 1, false);
  script_->fail(Operation::kToDevice, 3, false);
  EXPECT_NE(copy_to_device(), "");
  EXPECT_EQ(copy_to_device(), "");
  EXPECT_NE(copy_to_device(), "");
}

TEST_F(FaultScriptTest, CountsFromTheCallThatMakesTheRule) {
  EXPECT_EQ(copy_to_device(), "");
  script_->fail(Operation::kToDevice, 1, false);
  EXPECT_NE(copy_to_device(), "");
  EXPECT_EQ(copy_to_device(), "");
  script_->fail(Operation::kToDevice, 2, true);
  EXPECT_EQ(copy_to_device(), "");
  EXPECT_NE(copy_to_device(), "");
  EXPECT_NE(copy_to_device(), "");
  EXPECT_EQ(script_->count(Operation::kToDevice), 6);
  EXPECT_EQ(script_->met(), 3);
}

TEST_F(FaultScriptTest, JitterKeepsResultsAndOrder) {
  script_->jitter(Operation::kToDevice, 0.0005, 42);
  script_->jitter(Operation::kToHost, 0.0005, 43);
  for (std::uint32_t i = 0; i < 20; ++i) {
    const std::vector<std::uint8_t> source = random_bytes(500, i);
    std::vector<std::uint8_t> copied(500);
    const TicketPtr up = device_.to_device().submit(copy_job(target_.data(), source));
    device_.compute_waits(*up);
    device_.to_host().submit(copy_job(copied.data(), target_))->wait();
    EXPECT_EQ(copied, source);
  }
}

TEST_F(FaultScriptTest, JitterAndFailuresWorkTogether) {
  script_->jitter(Operation::kToDevice, 0.0002, 1);
  script_->fail(Operation::kToDevice, 2, false);
  EXPECT_EQ(copy_to_device(), "");
  EXPECT_NE(copy_to_device(), "");
  EXPECT_EQ(copy_to_device(), "");
}

}  // namespace
}  // namespace hydra::testing
