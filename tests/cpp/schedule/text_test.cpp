#include "csrc/schedule/text.h"

#include <gtest/gtest.h>

#include "csrc/base/errors.h"
#include "csrc/schedule/stream.h"
#include "tests/cpp/schedule/support.h"

namespace hydra::schedule {
namespace {

using test::made;
using test::message_of;

TEST(Text, IsWhatTheHeaderFileSays) {
  EXPECT_EQ(text(made("2bw", 2, 2, 3)),
            "hydra-schedule 1 stages=2 ranks=2 microbatches=3 versions=delay-1\n"
            "rank 0: U0-2 F0.0 B0.2-1 R0-1 F0.1 B0.0 F0.2 B0.1\n"
            "rank 1: U1-2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 R1\n");
}

TEST(Text, OfEveryKindIsReadAsItself) {
  for (const Schedule& schedule : {made("gpipe", 4, 2, 3), made("1f1b", 4, 4, 6), made("2bw", 5, 5, 4),
                                   made("pipedream", 5, 5, 1), made("interleaved", 6, 2, 5)}) {
    EXPECT_EQ(parse(text(schedule)), schedule);
    const Schedule written = written_out(schedule);
    EXPECT_NE(written, schedule);
    EXPECT_EQ(parse(text(written)), written);
    EXPECT_EQ(written_out(written), written);
  }
}

TEST(Text, HasBeginsOfUpdatesWhereTheyAreWritten) {
  const Schedule schedule = written_out(made("2bw", 2, 2, 3));
  EXPECT_EQ(text(schedule),
            "hydra-schedule 1 stages=2 ranks=2 microbatches=3 versions=delay-1\n"
            "rank 0: U0-2 RB0.2-1 F0.0 SF0.0 B0.2-1 R0-1 BU0-1 RB0.0 F0.1 SF0.1 B0.0 RB0.1 F0.2 SF0.2 B0.1\n"
            "rank 1: RF1.0 U1-2 BU1-1 F1.0 RF1.1 B1.0 SB1.0 F1.1 RF1.2 B1.1 SB1.1 F1.2 B1.2 SB1.2 R1\n");
  EXPECT_TRUE(schedule.begins_updates());
  EXPECT_FALSE(made("2bw", 2, 2, 3).begins_updates());
}

TEST(Text, OfAStageOnAnyRankIsRead) {
  const Schedule schedule = parse(
      "\n# ours\nhydra-schedule 1 versions=flush microbatches=1 ranks=2 stages=3 # fields in any order\r\n"
      "rank 1: F1.0 B1.0 R1 U1\n\n  rank 0: F0.0 F2.0 B2.0 R2 U2 B0.0 R0 U0");
  EXPECT_EQ(schedule.stages_of(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(schedule.rank_of(1), 1);
  EXPECT_TRUE(schedule.flushes());
}

TEST(Text, NamesLineAndWord) {
  const std::string header = "hydra-schedule 1 stages=2 ranks=2 microbatches=3 versions=flush\n";
  const auto refused = [](const std::string& text) { return message_of<InvalidSchedule>([&] { parse(text); }); };
  EXPECT_EQ(refused(header + "rank 0: F0.0 B0.7"), "line 2, 'B0.7': microbatch 7; there are 0 to 2");
  EXPECT_EQ(refused(header + "rank 0: F0.0\nrank 1: F0.0"), "line 3, 'F0.0': stage 0 is on rank 0 already");
  EXPECT_EQ(refused(header + "rank 0: F0.0 X"),
            "line 2, 'X': an action is such as F0.3, B0.3-1, SF0.3, R0 or U0-2: letters, stage, microbatch, batches "
            "before");
  EXPECT_NE(refused(""), "");
  EXPECT_NE(refused(header), "");
}

}  // namespace
}  // namespace hydra::schedule
