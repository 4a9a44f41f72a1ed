// The actions of one rank by a recipe, batch after batch, whatever their sizes: computes, reductions and ends of
// updates; no begins of updates (update_placer.h) and no communication yet.
//
//   1. Before the first forward of batch t on a stage that uses W(t - 1), what W(t - 1) is made of is finished there:
//      the backwards of batch t - 2, their reduction, the update. As late as possible, so that the sums over ranks have
//      a whole batch's time.
//   2. A forward is admitted; then backwards run, oldest first, while more than the recipe's limit are in flight.
//   3. A recipe that flushes runs all backwards at the end of the batch, then its updates.
//
// Forwards and backwards are in the same order on all ranks and the limit falls from rank to rank, so no sequence of
// batch sizes deadlocks. Owned by one thread.
#pragma once

#include <deque>

#include "csrc/schedule/action.h"
#include "csrc/schedule/recipe.h"

namespace hydra::schedule {

class Generator {
 public:
  /// `first_batch`: the number of the next one, as after a drain behind those before it.
  Generator(const Recipe& recipe, int rank, std::int64_t first_batch = 0);

  /// What the rank does in the step of the next batch. Throws InvalidSchedule for a size that cannot be, having changed
  /// nothing.
  Actions next_batch(int microbatches);
  /// All that is left of the batches so far. The next one begins as the first did, with its own number.
  Actions drain();

  std::int64_t batches() const noexcept { return batches_; }

 private:
  struct Pending {
    Turn turn;
    std::int64_t batch = 0;
    bool taken = false;  // false for a microbatch that is not there
  };
  struct Open {
    std::int64_t batch = 0;
    std::vector<int> left;  // of each of the rank's stages: backwards yet to run
  };

  /// `there` is false in a drain, which goes on as if batches came, and takes none of their turns.
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
  int microbatches_ = 0;                   // of the last batch
  std::deque<Pending> pending_;            // backwards in their order, those of the batch being admitted too
  std::deque<Open> open_;                  // batches, oldest first, until they are updated on all stages
  std::vector<std::int64_t> next_update_;  // of each of the rank's stages
  int in_flight_ = 0;
  Actions actions_;
};

}  // namespace hydra::schedule
