// The built-in kinds of schedules. Each is an order of forwards, an order of backwards and a limit on the microbatches
// in flight: forwards are admitted in their order, and backwards run whenever more than the limit are in flight.
//
//   gpipe        all forwards, then all backwards (GPipe, NeurIPS'19). With more stages than ranks, a rank runs a stage
//                for all microbatches before the next, so that weights are swapped twice a batch (Harmony, VLDB'22).
//   1f1b         at most S - s in flight at stage s, drained at the end of a batch (PipeDream-Flush).
//   interleaved  1f1b with V = S / R stages a rank, groups of R microbatches a stage (SC'21, arXiv 2104.04473, 2.2.2).
//   2bw          1f1b that is not drained; two versions (PipeDream-2BW). With more stages than ranks, it runs stage by
//                stage like gpipe, with the next batch's forwards between the backwards.
//   pipedream    1f1b that is not drained; each microbatch is a batch, with an update after it (PipeDream, SOSP'19).
//
// With S - s in flight, the latency between stages is on the critical path: a microbatch costs
// tF + tB + 2 * latency * (S - 1) / S. 1f1b and 2bw admit `ahead` more for every hop from a stage to the last one. That
// hides the latency as long as 2 * latency <= ahead * (tF + tB): between two stages k hops apart, k + 1 + k * ahead
// microbatches then share the (k + 1) * (tF + tB) + 2 * k * latency of a round trip. The saved tensors of all of them
// are stashed.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "csrc/schedule/version_rule.h"

namespace hydra::schedule {

enum class RecipeKind : std::uint8_t { kGpipe, kOneForwardOneBackward, kInterleaved, kTwoBufferedWeights, kPipedream };

/// A forward or backward of one microbatch on one stage.
struct Turn {
  int stage = 0;
  int microbatch = 0;
};

/// The order of one batch on one rank. Both lists may name microbatches that the batch does not have: those turns count
/// as in flight, but no action is made of them.
struct RankOrder {
  std::vector<Turn> forwards;
  std::vector<Turn> backwards;
  int in_flight = 0;  // the most forwards without their backwards when the next forward is admitted
};

struct Recipe {
  RecipeKind kind = RecipeKind::kGpipe;
  int stages = 1;
  int ranks = 1;
  int microbatches = 1;  // in every batch, unless next_batch() says otherwise
  bool vertical_sync = false;
  int ahead = 0;  // per hop: microbatches in flight beyond those that keep all stages busy if hops took no time

  /// Throws InvalidSchedule for an unknown name, and for numbers that the kind does not support.
  static Recipe named(std::string_view kind, int stages, int ranks, int microbatches, bool vertical_sync, int ahead);

  const char* name() const noexcept;
  VersionRule rule() const noexcept;
  bool flushes() const noexcept { return rule() == VersionRule::kFlush; }
  int stages_per_rank() const noexcept { return stages / ranks; }
  /// Throws InvalidSchedule if the schedule does not take batches of that many microbatches.
  void check_batch(int batch_microbatches) const;
  RankOrder order(int rank, int batch_microbatches) const;

 private:
  void check() const;
  /// The most microbatches that a rank may have sent on without having received their gradients.
  int sent_on(int rank) const noexcept;
};

}  // namespace hydra::schedule
