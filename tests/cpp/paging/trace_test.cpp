#include "csrc/paging/trace.h"

#include <gtest/gtest.h>

namespace hydra::test {
namespace {

constexpr Bytes kLimit = 100;

void run_pass(Trace& trace, PassKind kind, const std::vector<std::pair<std::int32_t, Bytes>>& entries,
              bool completed = true) {
  trace.begin(kind);
  Bytes previous = 0;
  for (const auto& [block, activations] : entries) {
    trace.arrive(block, previous);
    previous = activations;
  }
  trace.end(previous, completed);
}

std::vector<std::int32_t> blocks_of(const std::vector<Use>& uses) {
  std::vector<std::int32_t> blocks;
  for (const Use& use : uses) {
    blocks.push_back(use.block);
  }
  return blocks;
}

TEST(Trace, KnowsNothingOfTheFirstPass) {
  Trace trace;
  trace.begin(PassKind::kForward);
  EXPECT_TRUE(trace.future(kLimit, 0, 3).empty());
  trace.arrive(0, 0);
  EXPECT_TRUE(trace.future(kLimit, 0, 3).empty());
}

TEST(Trace, ExpectsTheOrderOfTheLastPassAndTheRoomItsActivationsLeft) {
  Trace trace;
  run_pass(trace, PassKind::kForward, {{0, 10}, {1, 30}, {2, 50}});
  trace.begin(PassKind::kForward);
  trace.arrive(0, 0);
  const std::vector<Use> future = trace.future(kLimit, 0, 3);
  ASSERT_GE(future.size(), 3U);
  EXPECT_EQ(future[0].block, 0);
  EXPECT_EQ(future[0].room, 90);
  EXPECT_EQ(future[1].room, 70);
  EXPECT_EQ(future[2].room, 50);
}

TEST(Trace, LeavesRoomForWhatWasThereBeforeTheFirstBlock) {
  Trace trace;
  trace.begin(PassKind::kForward);
  trace.arrive(0, 40);
  trace.arrive(1, 10);
  trace.end(20, true);
  trace.begin(PassKind::kForward);
  trace.arrive(0, 0);
  const std::vector<Use> future = trace.future(kLimit, 0, 2);
  ASSERT_GE(future.size(), 2U);
  EXPECT_EQ(future[0].room, 60);
  EXPECT_EQ(future[1].room, 80);
}

TEST(Trace, SeesThroughToThePassesThatFollowAndMarksThemNotLoadable) {
  Trace trace;
  for (int step = 0; step < 2; ++step) {
    run_pass(trace, PassKind::kForward, {{0, 0}, {1, 0}});
    run_pass(trace, PassKind::kBackward, {{1, 0}, {0, 0}});
  }
  trace.begin(PassKind::kForward);
  trace.arrive(0, 0);
  const std::vector<Use> future = trace.future(kLimit, 5, 2);
  EXPECT_EQ(blocks_of(future), (std::vector<std::int32_t>{0, 1, 1, 0, 0, 1}));
  EXPECT_TRUE(future[1].loadable);
  EXPECT_FALSE(future[2].loadable);
  EXPECT_EQ(future[1].room, kLimit);
  EXPECT_EQ(future[2].room, kLimit - 5) << "backward passes leave room for gradients";
}

TEST(Trace, FindsItsPositionAgainAfterASkippedBlock) {
  Trace trace;
  run_pass(trace, PassKind::kForward, {{0, 0}, {1, 0}, {2, 0}, {3, 0}});
  trace.begin(PassKind::kForward);
  trace.arrive(0, 0);
  trace.arrive(2, 0);
  EXPECT_EQ(blocks_of(trace.future(kLimit, 0, 4)).at(1), 3);
}

TEST(Trace, GivesUpOnAnUnknownOrderAndRecordsItAnew) {
  Trace trace;
  run_pass(trace, PassKind::kForward, {{0, 0}, {1, 0}, {2, 0}});
  trace.begin(PassKind::kForward);
  trace.arrive(2, 0);
  trace.arrive(1, 0);
  EXPECT_TRUE(trace.future(kLimit, 0, 3).empty());
  trace.arrive(0, 0);
  trace.end(0, true);
  EXPECT_EQ(trace.order_changes(), 1);
  trace.begin(PassKind::kForward);
  EXPECT_EQ(blocks_of(trace.future(kLimit, 0, 3)).at(0), 2);
}

TEST(Trace, LearnsNothingFromAPassThatFailed) {
  Trace trace;
  run_pass(trace, PassKind::kForward, {{0, 0}, {1, 0}});
  run_pass(trace, PassKind::kForward, {{1, 0}}, /*completed=*/false);
  EXPECT_EQ(trace.order_changes(), 0);
  trace.begin(PassKind::kForward);
  EXPECT_EQ(blocks_of(trace.future(kLimit, 0, 2)).at(0), 0);
}

TEST(Trace, RemembersTheLargestActivationsOfEqualPasses) {
  Trace trace;
  run_pass(trace, PassKind::kForward, {{0, 40}});
  run_pass(trace, PassKind::kForward, {{0, 10}});
  trace.begin(PassKind::kForward);
  trace.arrive(0, 0);
  EXPECT_EQ(trace.future(kLimit, 0, 1).at(0).room, 60);
}

Bytes room_of_the_only_block(Trace& trace) {
  trace.begin(PassKind::kForward);
  trace.arrive(0, 0);
  const Bytes room = trace.future(kLimit, 0, 1).at(0).room;
  trace.end(0, /*completed=*/false);
  return room;
}

TEST(Trace, ForgetsLargeActivationsAfterManySmallerOnes) {
  Trace trace;
  run_pass(trace, PassKind::kForward, {{0, 40}});
  int passes = 0;
  while (room_of_the_only_block(trace) == 60) {
    ASSERT_LE(++passes, 32);
    run_pass(trace, PassKind::kForward, {{0, 10}});
  }
  EXPECT_EQ(room_of_the_only_block(trace), 90);
  EXPECT_GE(passes, 16);
}

TEST(Trace, ForgetsLargeActivationsAfterOnePassIfAsked) {
  Trace trace;
  run_pass(trace, PassKind::kForward, {{0, 40}});
  trace.forget_activations();
  EXPECT_EQ(room_of_the_only_block(trace), 60) << "the best figure until another pass has ended";
  run_pass(trace, PassKind::kForward, {{0, 10}});
  EXPECT_EQ(room_of_the_only_block(trace), 90);
  run_pass(trace, PassKind::kForward, {{0, 20}});
  run_pass(trace, PassKind::kForward, {{0, 5}});
  EXPECT_EQ(room_of_the_only_block(trace), 80) << "those after it count again";
}

TEST(Trace, RemembersTheOrderOfEachVersionByItself) {
  Trace trace;
  for (int round = 0; round < 2; ++round) {
    for (const int version : {0, 1}) {
      trace.begin(PassKind::kForward, version);
      trace.arrive(2 * version, 0);
      trace.arrive(2 * version + 1, 0);
      trace.end(0, true);
    }
  }
  EXPECT_EQ(trace.order_changes(), 0);
  trace.begin(PassKind::kForward, 0);
  trace.arrive(0, 0);
  EXPECT_EQ(blocks_of(trace.future(kLimit, 0, 2)), (std::vector<std::int32_t>{0, 1, 2, 3, 0, 1}));
}

}  // namespace
}  // namespace hydra::test
