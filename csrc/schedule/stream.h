// The actions of one rank, step after step: computes, reductions, updates, sends and receives. Batches are counted from
// the start of training. Begins of updates, and communication, are added if the schedule has none. Owned by one thread.
#pragma once

#include <optional>

#include "csrc/schedule/generator.h"
#include "csrc/schedule/schedule.h"
#include "csrc/schedule/update_placer.h"

namespace hydra::schedule {

/// Repeats a rank's body step by step, without the actions of batches that do not exist.
class BodyReader {
 public:
  /// `first_batch`: the number of the next batch. The pipeline is empty, as after a drain of the batches before it.
  /// Throws InvalidSchedule for an unknown rank.
  BodyReader(const Schedule& schedule, int rank, std::int64_t first_batch);

  /// Throws InvalidSchedule unless the bodies are written for that many microbatches.
  Actions next_batch(int microbatches);
  Actions drain();
  std::int64_t batches() const noexcept { return batches_; }

 private:
  void read(std::int64_t step, std::int64_t end, Actions& actions) const;

  Actions body_;
  int microbatches_;
  int steps_behind_;
  std::int64_t first_;  // the first batch since the last drain
  std::int64_t batches_;
};

class Stream {
 public:
  /// `first_batch`: where training continues; all updates of earlier batches have been made. Throws InvalidSchedule for
  /// an unknown rank, and for a negative number.
  Stream(const Schedule& schedule, int rank, std::int64_t first_batch = 0);

  /// The actions in the step of the next batch. Built-in schedules that flush, and 2bw with one stage a rank, take
  /// batches of any size. All others throw InvalidSchedule, and change nothing, unless the size is the one that they
  /// were made for.
  Actions next_batch(int microbatches);
  /// The remaining actions of the batches so far, updates included; none if the schedule flushes. The next batch fills
  /// an empty pipeline, and uses the version that it would use without the drain.
  Actions drain();
  /// The actions that compute the losses of a batch without training: forwards, stage after stage, with their sends and
  /// receives. The caller chooses the batch's number, below 0. No version belongs to such a batch, so its forwards use
  /// the newest. The stream does not change.
  Actions evaluation(std::int64_t batch, int microbatches) const;
  /// The number of batches so far, which is the number of the next one.
  std::int64_t batches() const noexcept;

 private:
  Schedule schedule_;
  int rank_;
  std::optional<Generator> generator_;  // for a built-in schedule
  BodyReader reader_;                   // for any other
  UpdatePlacer placer_;
};

/// The actions of all ranks in `batches` steps and a drain, made from the bodies alone.
std::vector<Actions> unroll(const Schedule& schedule, int batches);

/// The schedule with begins of updates and communication written into its bodies.
Schedule written_out(const Schedule& schedule);

}  // namespace hydra::schedule
