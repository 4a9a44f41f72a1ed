// The built-in kinds of schedules, each as an order of forwards, an order of backwards and a limit of what may be in
// flight: forwards are admitted in their order, and whenever more than the limit are in flight the next backwards run.
//
//   gpipe        all forwards, then all backwards (GPipe, NeurIPS'19). With more stages than ranks a rank runs a stage
//                for all microbatches before the next, so that weights are swapped twice a batch (Harmony, VLDB'22).
//   1f1b         at most S - s in flight at stage s, emptied at the end of a batch (PipeDream-Flush).
//   interleaved  1f1b with V = S / R stages a rank, groups of R microbatches a stage (SC'21, arXiv 2104.04473, 2.2.2).
//   2bw          1f1b that is not emptied; two versions (PipeDream-2BW). With more stages than ranks, stage by stage as
//                gpipe, the next batch's forwards between the backwards.
//   pipedream    1f1b that is not emptied, an update after every microbatch, which is a batch (PipeDream, SOSP'19).
//
// With S - s in flight, what a microbatch takes from stage to stage is on the critical path: a microbatch costs
// tF + tB + 2 * latency * (S - 1) / S. With `ahead` more for every hop from here to the last stage, 1f1b and 2bw hide
// that as long as 2 * latency <= ahead * (tF + tB): between any two stages, k hops apart, k + 1 + k * ahead
// microbatches then share the (k + 1) * (tF + tB) + 2 * k * latency of a round. They are stashed.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "csrc/schedule/version_rule.h"

namespace hydra::schedule {

enum class RecipeKind : std::uint8_t { kGpipe, kOneForwardOneBackward, kInterleaved, kTwoBufferedWeights, kPipedream };

/// What one microbatch does on one stage.
struct Turn {
  int stage = 0;
  int microbatch = 0;
};

/// One batch on one rank. Both lists may name microbatches that the batch does not have: those turns are counted and
/// not taken.
struct RankOrder {
  std::vector<Turn> forwards;
  std::vector<Turn> backwards;
  int in_flight = 0;  // forwards without their backwards that may be there before the next forward is admitted
};

struct Recipe {
  RecipeKind kind = RecipeKind::kGpipe;
  int stages = 1;
  int ranks = 1;
  int microbatches = 1;  // of every batch, unless next_batch() says otherwise
  bool vertical_sync = false;
  int ahead = 0;  // per hop: microbatches in flight beyond those that keep all stages at work if hops take no time

  /// Throws InvalidSchedule for a name that is none, and for numbers that the kind cannot do.
  static Recipe named(std::string_view kind, int stages, int ranks, int microbatches, bool vertical_sync, int ahead);

  const char* name() const noexcept;
  VersionRule rule() const noexcept;
  bool flushes() const noexcept { return rule() == VersionRule::kFlush; }
  int stages_per_rank() const noexcept { return stages / ranks; }
  /// Throws InvalidSchedule if a batch of so many cannot be one of this schedule's.
  void check_batch(int batch_microbatches) const;
  RankOrder order(int rank, int batch_microbatches) const;

 private:
  void check() const;
  /// Microbatches that a rank may have sent on, for each of which nothing has come back.
  int sent_on(int rank) const noexcept;
};

}  // namespace hydra::schedule
