#include "csrc/schedule/verifier.h"

#include <gtest/gtest.h>

#include "csrc/base/errors.h"
#include "tests/cpp/schedule/support.h"

namespace hydra::schedule {
namespace {

using test::made;
using test::message_of;

std::string problem(const std::string& bodies, const char* versions = "flush", const char* microbatches = "1") {
  return message_of<InvalidSchedule>([&] {
    verify(parse("hydra-schedule 1 stages=2 ranks=2 microbatches=" + std::string(microbatches) +
                 " versions=" + versions + "\n" + bodies));
  });
}

TEST(Verifier, AcceptsEveryDepthAndSizeOfEveryKind) {
  for (int depth = 1; depth <= 8; ++depth) {
    for (int microbatches = 1; microbatches <= 32; ++microbatches) {
      EXPECT_NO_THROW(verify(made("gpipe", depth, depth, microbatches)));
      EXPECT_NO_THROW(verify(made("1f1b", depth, depth, microbatches)));
      EXPECT_NO_THROW(verify(made("interleaved", 2 * depth, depth, microbatches)));
      EXPECT_NO_THROW(verify(made("gpipe", 3 * depth, depth, microbatches)));
      if (microbatches >= depth - 1) {
        EXPECT_NO_THROW(verify(made("2bw", depth, depth, microbatches)));
        EXPECT_NO_THROW(verify(made("2bw", 3 * depth, depth, microbatches)));
      }
    }
    EXPECT_NO_THROW(verify(made("pipedream", depth, depth, 1)));
  }
}

TEST(Verifier, MeasuresPeaks) {
  const Verification two_versions = verify(made("2bw", 3, 3, 4));
  EXPECT_EQ(two_versions.stages, (std::vector<Peaks>{{3, 2, 2}, {2, 2, 2}, {1, 2, 2}}));
  EXPECT_EQ(two_versions.ranks, two_versions.stages);
  EXPECT_TRUE(two_versions.rendezvous);
  const Verification stashing = verify(made("pipedream", 3, 3, 1));
  EXPECT_EQ(stashing.stages, (std::vector<Peaks>{{3, 3, 1}, {2, 2, 1}, {1, 1, 1}}));
  EXPECT_FALSE(stashing.rendezvous);
  const Verification wrapped = verify(made("gpipe", 4, 2, 5));
  EXPECT_EQ(wrapped.stages, (std::vector<Peaks>(4, {5, 1, 1})));
  EXPECT_EQ(wrapped.ranks, (std::vector<Peaks>(2, {10, 2, 2})));
}

TEST(Verifier, ChecksLimits) {
  const Schedule schedule = made("1f1b", 4, 4, 8);
  EXPECT_NO_THROW(verify(schedule, {.in_flight = 4, .versions = 1, .gradients = 1}));
  EXPECT_EQ(message_of<InvalidSchedule>([&] { verify(schedule, {.in_flight = 2}); }),
            "rank 0, its action 4, F0.2 of batch 0: 3 microbatches are in flight on this stage, where the limit is 2");
}

TEST(Verifier, FindsWhatIsWrongOnARank) {
  EXPECT_EQ(problem("rank 0: F0.0 B0.0 R0 U0\nrank 1: F1.0 B1.0 R1 U1"), "");
  EXPECT_EQ(problem("rank 0: F0.0 B0.0 U0 R0\nrank 1: F1.0 B1.0 R1 U1"),
            "rank 0, its action 4, U0 of batch 0: its gradients were not reduced: put R of that batch before it");
  EXPECT_EQ(problem("rank 0: F0.0 B0.0 R0 U0-1\nrank 1: F1.0 B1.0 R1 U1"),
            "rank 0, its action 6, F0.0 of batch 1: it uses W(1) (versions=flush), but the newest version is W(0): put "
            "U of batch 0 before it");
  EXPECT_EQ(problem("rank 0: F0.0 B0.0 R0 U0-1\nrank 1: F1.0 B1.0 R1 U1", "delay-1"), "");
  EXPECT_EQ(problem("rank 0: F0.0 B0.0 R0-1 U0-1\nrank 1: F1.0 B1.0 R1 U1", "delay-1"),
            "rank 0, its action 7, B0.0 of batch 1: the gradients of the previous batch are still being summed: put R "
            "of that batch before it");
  EXPECT_EQ(problem("rank 0: F0.0 R0-1 B0.0 U0-1\nrank 1: F1.0 B1.0 R1 U1", "delay-1"), "");
}

TEST(Verifier, FindsRanksThatBlockEachOther) {
  EXPECT_EQ(problem("rank 0: F0.0 B0.0 F0.1 B0.1 R0 U0\nrank 1: F1.0 F1.1 B1.0 B1.1 R1 U1", "flush", "2"),
            "ranks block each other: rank 0 at its action 3, B0.0 of batch 0, waits for SB1.0; rank 1 at its action 3, "
            "F1.1 of batch 0, waits for SF0.1");
  EXPECT_EQ(problem("rank 0: F0.0 B0.0 R0 U0\nrank 1: F1.0 R1-1 B1.0 U1-1", "delay-1"),
            "ranks block each other: rank 0 at its action 6, U0 of batch 0, waits for R of that batch on every stage; "
            "rank 1 at its action 5, F1.0 of batch 1, waits for SF0.0");
}

TEST(Verifier, FindsQueuesWithTwoOrders) {
  EXPECT_EQ(problem("rank 0: F0.0 F0.1 B0.1 B0.0 R0 U0\nrank 1: F1.0 F1.1 B1.0 B1.1 R1 U1", "flush", "2"),
            "from stage 1 to stage 0, value 0: SB1.0 of batch 0 is sent, where RB0.1 of batch 0 is received; both ends "
            "have to use the same order");
}

}  // namespace
}  // namespace hydra::schedule
