// The pass that says from where on an update may be made: puts BU into what a rank does, however that was made.
//
// BU of batch t comes as early as all of this is so:
//   1. R of batch t is behind it on all of the rank's stages: a rank sums the gradients of all its stages together.
//   2. U of batch t - 1 is behind it on the stage: the update reads the version that U publishes.
//   3. A stage with one buffer is updated in place: nothing lies between its BU and its U.
// With more buffers the one that the update writes to is free then. It has W(t + 1 - buffers), which batch t was the
// last to use (version_rule.h), and by 1 the backwards of batch t have run.
//
// Three facts are known only when the actions run: whether the sums have ended, whether their norm is finite, and
// whether the optimizer can step behind other actions. The runtime looks before every forward and backward between BU
// and U; what has not begun by U is made there. So BU never waits, and no rank waits for another because of it.
#pragma once

#include <vector>

#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

/// Owned by one thread.
class UpdatePlacer {
 public:
  /// `first_batch`: the updates of all batches before it have been made. Throws InvalidSchedule for a rank that is not
  /// there.
  UpdatePlacer(const Schedule& schedule, int rank, std::int64_t first_batch);

  /// Takes the rank's next actions, which have no BU, and returns them with it. No BU is put before a U that has no
  /// place; the verifier says why.
  Actions place(const Actions& actions);

 private:
  struct Stage {
    int number = 0;
    bool in_place = false;
    // Batches before these are reduced, begun and updated.
    std::int64_t reduced = 0;
    std::int64_t begun = 0;
    std::int64_t updated = 0;
  };

  /// Batches before it are reduced on all stages.
  std::int64_t reduced() const;
  static bool may_begin(const Stage& stage, std::int64_t reduced);
  static void begin(Stage& stage, Actions& placed);
  void begin_beside(Actions& placed);
  Stage& stage(int number);

  std::vector<Stage> stages_;  // of the rank
};

}  // namespace hydra::schedule
