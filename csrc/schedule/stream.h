// What one rank does, step after step, with batches counted from the start of training: computes, reductions, updates,
// sends and receives. Begins of updates, and communication, are added where the schedule has none. Owned by one thread.
#pragma once

#include <optional>

#include "csrc/schedule/generator.h"
#include "csrc/schedule/schedule.h"
#include "csrc/schedule/update_placer.h"

namespace hydra::schedule {

/// The bodies one after the other, without what is of no batch.
class BodyReader {
 public:
  /// `first_batch`: the number of the next one, as after a drain behind those before it. Throws InvalidSchedule for a
  /// rank that is not there.
  BodyReader(const Schedule& schedule, int rank, std::int64_t first_batch);

  /// Throws InvalidSchedule unless the bodies are for that many microbatches.
  Actions next_batch(int microbatches);
  Actions drain();
  std::int64_t batches() const noexcept { return batches_; }

 private:
  void read(std::int64_t step, std::int64_t end, Actions& actions) const;

  Actions body_;
  int microbatches_;
  int steps_behind_;
  std::int64_t first_;  // after the last drain
  std::int64_t batches_;
};

class Stream {
 public:
  /// `first_batch`: where a training goes on that has made all updates of the batches before it. Throws
  /// InvalidSchedule for a rank that is not there, and for a negative number.
  Stream(const Schedule& schedule, int rank, std::int64_t first_batch = 0);

  /// The step of the next batch. Built-in schedules that flush, and 2bw with one stage a rank, take batches of any
  /// size; any other throws InvalidSchedule, having changed nothing, unless it is the size it was made for.
  Actions next_batch(int microbatches);
  /// What is left of the batches so far, updates included; nothing where the schedule flushes. The next batch fills
  /// the pipeline anew, and uses the version that it would use without the drain.
  Actions drain();
  /// The losses of a batch that is not trained with: forwards alone, stage after stage, and what they send and receive.
  /// Its number is the caller's, below 0: no version belongs to it, so that they use the newest. The stream is as
  /// before.
  Actions evaluation(std::int64_t batch, int microbatches) const;
  /// So far: the number of the next one.
  std::int64_t batches() const noexcept;

 private:
  Schedule schedule_;
  int rank_;
  std::optional<Generator> generator_;  // of a built-in schedule
  BodyReader reader_;                   // of any other
  UpdatePlacer placer_;
};

/// What the ranks do in `batches` steps and a drain, from the bodies alone.
std::vector<Actions> unroll(const Schedule& schedule, int batches);

/// With all that is added to the bodies written in them.
Schedule written_out(const Schedule& schedule);

}  // namespace hydra::schedule
