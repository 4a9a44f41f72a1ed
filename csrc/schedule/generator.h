// Generates the actions of one rank by a recipe, batch after batch, for batches of any size: computes, reductions and
// ends of updates. It makes no begins of updates (update_placer.h) and no communication (communication.h).
//
//   1. The first forward of batch t on a stage that uses W(t - 1) comes after everything that makes W(t - 1): the
//      backwards of batch t - 2, their reduction and the update. These come as late as possible, so that the sums over
//      ranks have the time of a whole batch.
//   2. After each forward, backwards run, oldest first, while more than the recipe's limit are in flight.
//   3. A recipe that flushes runs all backwards at the end of the batch, then its updates.
//
// Forwards and backwards have the same order on all ranks, and the limit falls from rank to rank; so no sequence of
// batch sizes deadlocks. Owned by one thread.
#pragma once

#include <deque>

#include "csrc/schedule/action.h"
#include "csrc/schedule/recipe.h"

namespace hydra::schedule {

class Generator {
 public:
  /// `first_batch`: the number of the next batch. The pipeline is empty, as after a drain of the batches before it.
  Generator(const Recipe& recipe, int rank, std::int64_t first_batch = 0);

  /// The rank's actions in the step of the next batch. Throws InvalidSchedule for a size that the recipe does not take;
  /// then nothing has changed.
  Actions next_batch(int microbatches);
  /// The remaining actions of all batches so far. The next batch fills an empty pipeline, like the first.
  Actions drain();

  std::int64_t batches() const noexcept { return batches_; }

 private:
  struct Pending {
    Turn turn;
    std::int64_t batch = 0;
    bool taken = false;  // false for a microbatch that the batch does not have
  };
  struct Open {
    std::int64_t batch = 0;
    std::vector<int> left;  // by the rank's stages: backwards yet to run
  };

  /// `there` is false in a drain, which continues as if batches came but takes none of their turns.
  void admit(std::int64_t batch, int microbatches, bool there);
  void run_backward();
  void finish(int stage, std::int64_t batch);
  void update(int stage, std::int64_t batch);
  int& left(int stage, std::int64_t batch);
  std::size_t local(int stage) const noexcept { return index(stage / recipe_.ranks); }
  void emit(ActionKind kind, int stage, std::int64_t batch, int microbatch = 0);

  Recipe recipe_;
  int rank_;
  std::int64_t batches_;
  int microbatches_ = 0;                   // in the last batch
  std::deque<Pending> pending_;            // backwards in their order, including those of the batch being admitted
  std::deque<Open> open_;                  // batches, oldest first, until they are updated on all of the rank's stages
  std::vector<std::int64_t> next_update_;  // by the rank's stages: the batch of the next update
  int in_flight_ = 0;
  Actions actions_;
};

}  // namespace hydra::schedule
