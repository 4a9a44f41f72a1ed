// A block's place goes from state to state by legal steps only, and its pages are readable in one of them.
#include "csrc/paging/block_place.h"

#include <gtest/gtest.h>

#include <memory>

#include "csrc/base/errors.h"
#include "csrc/transfer/simulated_device.h"
#include "tests/cpp/paging/pager_support.h"

namespace hydra::test {
namespace {

constexpr Bytes kBlockBytes = 512;

class ReachedFence final : public Fence {
 public:
  bool reached() const noexcept override { return true; }
  void wait() noexcept override {}
};

class BlockPlaceTest : public ::testing::Test {
 protected:
  BlockPlaceTest() {
    auto client = std::make_unique<FakeBlock>(random_bytes(kBlockBytes, 1));
    client_ = client.get();
    place_ = std::make_unique<BlockPlace>(kBlockBytes, std::move(client));
  }

  void land() {
    place_->begin_reserving();
    place_->land({.memory = memory_.data(), .bytes = kBlockBytes});
  }
  void fill() {
    place_->begin_filling(device_.to_device(), Priority::kFault, 0);
    place_->ticket()->wait();
  }

  SimulatedDevice device_;
  std::vector<std::uint8_t> memory_ = std::vector<std::uint8_t>(kBlockBytes);
  FakeBlock* client_ = nullptr;
  std::unique_ptr<BlockPlace> place_;
};

TEST_F(BlockPlaceTest, IsReadableFromTheEndOfAFillToALossOfItsSlot) {
  land();
  EXPECT_EQ(place_->state(), BlockState::kStale);
  fill();
  EXPECT_EQ(place_->state(), BlockState::kLoading);
  EXPECT_FALSE(client_->readable());
  place_->note_filled(/*has_ended=*/false);
  EXPECT_TRUE(client_->equal());
  EXPECT_FALSE(place_->is_ready()) << "another thread's compute has to wait for the fill itself";
  place_->note_filled(/*has_ended=*/true);
  EXPECT_TRUE(place_->is_ready());
  const Slot slot = place_->give_up_slot();
  EXPECT_EQ(slot.memory, memory_.data());
  EXPECT_EQ(slot.bytes, kBlockBytes);
  EXPECT_EQ(place_->state(), BlockState::kAbsent);
  EXPECT_FALSE(client_->readable());
}

TEST_F(BlockPlaceTest, RefusesIllegalStepsAndChangesNothing) {
  EXPECT_THROW(place_->cancel_reserving(), StateError);
  EXPECT_THROW(place_->land({.memory = memory_.data(), .bytes = kBlockBytes}), StateError);
  EXPECT_THROW(fill(), StateError);
  EXPECT_EQ(place_->state(), BlockState::kAbsent);
  EXPECT_EQ(place_->memory(), nullptr);
  land();
  EXPECT_THROW(place_->begin_reserving(), StateError);
  EXPECT_EQ(place_->state(), BlockState::kStale);
  fill();
  EXPECT_THROW(fill(), StateError);
  EXPECT_EQ(place_->state(), BlockState::kLoading);
}

TEST_F(BlockPlaceTest, LosesNothingWhereThereIsNoSlot) {
  place_->become_stale();
  EXPECT_EQ(place_->give_up_slot().memory, nullptr);
  EXPECT_EQ(place_->state(), BlockState::kAbsent);
  place_->begin_reserving();
  place_->become_stale();
  EXPECT_EQ(place_->give_up_slot().memory, nullptr);
  EXPECT_EQ(place_->state(), BlockState::kReserving);
}

TEST_F(BlockPlaceTest, GivesItsSlotUpWithTheFencesOfItsUsers) {
  land();
  const auto fence = std::make_shared<ReachedFence>();
  place_->uses().note_written(fence);
  EXPECT_EQ(place_->uses().written(), fence);
  const Slot slot = place_->give_up_slot();
  ASSERT_EQ(slot.fences.size(), 1U);
  EXPECT_EQ(slot.fences[0], fence);
  EXPECT_TRUE(place_->uses().fences().empty());
  EXPECT_EQ(place_->uses().written(), nullptr);
}

}  // namespace
}  // namespace hydra::test
