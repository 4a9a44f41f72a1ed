#include "csrc/schedule/stream.h"

#include <gtest/gtest.h>

#include <random>

#include "csrc/base/errors.h"
#include "csrc/schedule/verifier.h"
#include "csrc/schedule/wait_graph.h"
#include "tests/cpp/schedule/support.h"

namespace hydra::schedule {
namespace {

using test::made;
using test::message_of;
using test::words;

Actions stream_of(const Schedule& schedule, int rank, const std::vector<int>& sizes) {
  Stream stream(schedule, rank);
  Actions actions;
  const auto append = [&](const Actions& more) { actions.insert(actions.end(), more.begin(), more.end()); };
  for (const int size : sizes) {
    append(size > 0 ? stream.next_batch(size) : stream.drain());
  }
  append(stream.drain());
  return actions;
}

TEST(Stream, RunsABodyABatchAndThenWhatIsLeft) {
  const Schedule schedule = made("2bw", 3, 3, 2);
  Stream stream(schedule, 0);
  EXPECT_EQ(words(stream.next_batch(2)), "F0.0 SF0.0 F0.1 SF0.1");
  EXPECT_EQ(words(stream.next_batch(2)), "RB0.0 F0.0 SF0.0 B0.0 RB0.1 F0.1 SF0.1 B0.1 R0 BU0");
  EXPECT_EQ(words(stream.drain()), "RB0.0 U0 RB0.1 B0.0 B0.1 R0 BU0 U0");
  EXPECT_EQ(stream.batches(), 2);
  EXPECT_EQ(words(stream.drain()), "");
}

TEST(Stream, BeginsAnewAfterADrain) {
  const Schedule made_by_recipe = made("2bw", 3, 3, 2);
  for (const Schedule& schedule : {made_by_recipe, parse(text(made_by_recipe))}) {
    Stream fresh(schedule, 0);
    Stream drained(schedule, 0);
    for (int batch = 0; batch < 3; ++batch) {
      drained.next_batch(2);
    }
    drained.drain();
    for (int batch = 0; batch < 3; ++batch) {
      Actions expected = fresh.next_batch(2);
      for (Action& action : expected) {
        action.batch += 3;
      }
      EXPECT_EQ(drained.next_batch(2), expected);
    }
  }
}

TEST(Stream, BeginsAtABatchAsADrainBeforeItLeavesOff) {
  const Schedule made_by_recipe = made("2bw", 3, 3, 2);
  for (const Schedule& schedule : {made_by_recipe, parse(text(made_by_recipe))}) {
    Stream drained(schedule, 1);
    for (int batch = 0; batch < 3; ++batch) {
      drained.next_batch(2);
    }
    drained.drain();
    Stream later(schedule, 1, 3);
    EXPECT_EQ(later.batches(), 3);
    EXPECT_EQ(words(later.drain()), "");
    for (int batch = 0; batch < 3; ++batch) {
      EXPECT_EQ(later.next_batch(2), drained.next_batch(2));
    }
    EXPECT_EQ(later.drain(), drained.drain());
    EXPECT_THROW(Stream(schedule, 1, -1), InvalidSchedule);
  }
}

TEST(Stream, WithOneSizeIsTheUnrolledBodies) {
  for (const Schedule& schedule : {made("gpipe", 4, 4, 3), made("1f1b", 4, 4, 6), made("2bw", 5, 5, 4),
                                   made("pipedream", 5, 5, 1), made("interleaved", 6, 2, 5), made("2bw", 6, 2, 3)}) {
    const std::vector<Actions> unrolled = unroll(schedule, 7);
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      EXPECT_EQ(stream_of(schedule, rank, std::vector<int>(7, schedule.microbatches())), unrolled[index(rank)]);
    }
  }
}

TEST(Stream, EvaluatesStageAfterStageAndIsAsBefore) {
  const Schedule schedule = made("2bw", 4, 2, 3);
  Stream stream(schedule, 1);
  stream.next_batch(3);
  EXPECT_EQ(words(stream.evaluation(-2, 2)),
            "RF1.0-2 RF1.1-2 F1.0-2 SF1.0-2 RF3.0-2 F1.1-2 SF1.1-2 RF3.1-2 F3.0-2 F3.1-2");
  EXPECT_EQ(stream.batches(), 1);
  EXPECT_THROW(stream.evaluation(0, 2), InvalidSchedule);
  EXPECT_THROW(stream.evaluation(-2, 0), InvalidSchedule);
}

TEST(Stream, EvaluatesWithoutADeadlock) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (int chunks = 1; chunks <= 3; ++chunks) {
      const Schedule schedule = made("gpipe", ranks * chunks, ranks, 2);
      for (const int microbatches : {1, 2, 5}) {
        std::vector<Actions> actions;
        for (int rank = 0; rank < ranks; ++rank) {
          actions.push_back(Stream(schedule, rank).evaluation(-1, microbatches));
          for (Action& action : actions.back()) {
            action.batch = 0;
          }
        }
        const BatchIndex batches(schedule.stages(), {microbatches});
        const auto reached = WaitGraph(schedule, actions, batches).run(false, [](int, std::size_t) {});
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(reached[index(rank)], actions[index(rank)].size());
        }
      }
    }
  }
}

TEST(Stream, TakesBatchesOfAnySizeWithDrainsBetweenThem) {
  std::mt19937 dice(7);
  for (int trial = 0; trial < 300; ++trial) {
    const int depth = std::uniform_int_distribution(1, 8)(dice);
    std::vector<int> sizes(index(std::uniform_int_distribution(1, 12)(dice)));
    std::vector<int> batches;
    for (int& size : sizes) {
      size = std::uniform_int_distribution(0, 14)(dice);
      if (size > 0) {
        batches.push_back(size);
      }
    }
    for (const char* kind : {"gpipe", "1f1b", "2bw"}) {
      const Schedule schedule = made(kind, depth, depth, 9);
      std::vector<Actions> ranks;
      for (int rank = 0; rank < depth; ++rank) {
        ranks.push_back(stream_of(schedule, rank, sizes));
      }
      EXPECT_EQ(verify(schedule, ranks, batches).batches, static_cast<int>(batches.size()));
    }
  }
}

TEST(Stream, RefusesASizeItCannotDoAndGoesOn) {
  const Schedule wrapped = made("2bw", 4, 2, 3);
  Stream stream(wrapped, 1);
  const auto refused = message_of<InvalidSchedule>([&] { stream.next_batch(4); });
  EXPECT_EQ(refused, "2bw with 2 stage(s) a rank: a batch of 4 microbatches; give 3, which the schedule was made for");
  EXPECT_EQ(stream.next_batch(3), Stream(wrapped, 1).next_batch(3));

  Stream written(parse(text(made("gpipe", 2, 2, 3))), 0);
  EXPECT_NE(message_of<InvalidSchedule>([&] { written.next_batch(2); }), "");
  EXPECT_EQ(written.batches(), 0);
}

TEST(Recipe, RefusesWhatItCannotDo) {
  const auto refused = [](const char* kind, int stages, int ranks, int microbatches) {
    return message_of<InvalidSchedule>([&] { made(kind, stages, ranks, microbatches); });
  };
  EXPECT_EQ(refused("2bw", 4, 4, 2),
            "2bw with stages=4, ranks=4, microbatches=2: two versions of the weights are enough only for (ranks - "
            "1) * (1 + ahead) microbatches or more: give at least 3, or use fewer ranks, or '1f1b'");
  EXPECT_EQ(refused("2bw", 4, 4, 3), "");
  EXPECT_NE(refused("gpipe", 3, 2, 1), "");
  EXPECT_NE(refused("interleaved", 2, 2, 4), "");
  EXPECT_NE(refused("none", 2, 2, 4), "");
}

TEST(Schedule, IsWhatItsBodiesSay) {
  const Action forward{.kind = ActionKind::kForward};
  const Action later{.kind = ActionKind::kBackward, .batch = 1};
  const Action absent{.kind = ActionKind::kForward, .stage = 2};
  const auto refused = [](int stages, std::vector<Actions> bodies) {
    return message_of<InvalidSchedule>([&] { Schedule(stages, 1, VersionRule::kFlush, std::move(bodies)); });
  };
  EXPECT_EQ(refused(1, {{forward}}), "");
  EXPECT_EQ(refused(2, {{forward}}), "stage 1 of 2 is on no rank; give its actions to one rank");
  EXPECT_EQ(refused(1, {{forward}, {}}), "rank 1 has no actions; give every rank a stage, or use fewer ranks");
  EXPECT_EQ(refused(1, {{forward}, {forward}}),
            "rank 1, F0.0: stage 0 is on rank 0 already; a stage lives on one rank");
  EXPECT_EQ(refused(1, {{later}}), "rank 0, B0.0: batch 1, counted from that of the step; give 0 to -4096");
  EXPECT_EQ(refused(1, {{absent}}), "rank 0, F2.0: stage 2; there are 0 to 0");
  EXPECT_NE(refused(0, {}), "");
}

}  // namespace
}  // namespace hydra::schedule
