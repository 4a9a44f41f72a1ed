// The pass that decides where updates may begin: it inserts BU into the actions of a rank, whatever made them.
//
// BU of batch t comes at the earliest place at which all three conditions hold:
//   1. R of batch t has run on all of the rank's stages: a rank sums the gradients of all its stages together.
//   2. U of batch t - 1 has run on the stage: the update reads the version that U publishes.
//   3. A stage with one buffer is updated in place: its U follows its BU directly.
// With more buffers, the one that the update writes to is free then. It holds W(t + 1 - buffers), which batch t was the
// last to use (version_rule.h), and by condition 1 the backwards of batch t have run.
//
// Three facts are known only when the actions run: whether the sums have ended, whether their norm is finite, and
// whether the optimizer can step behind other actions. The runtime checks them before every forward and backward
// between BU and U; an update that has not begun by then is made at U. So BU never waits, and no rank waits for another
// because of it.
#pragma once

#include <vector>

#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

/// Owned by one thread.
class UpdatePlacer {
 public:
  /// `first_batch`: the updates of all earlier batches have been made. Throws InvalidSchedule for an unknown rank.
  UpdatePlacer(const Schedule& schedule, int rank, std::int64_t first_batch);

  /// Takes the rank's next actions, which have no BU, and returns them with BU inserted. A U whose update cannot begin
  /// gets no BU; the verifier says why.
  Actions place(const Actions& actions);

 private:
  struct Stage {
    int number = 0;
    bool in_place = false;
    // The numbers of the first batch that is not reduced, whose update has not begun, and whose update is not made.
    std::int64_t reduced = 0;
    std::int64_t begun = 0;
    std::int64_t updated = 0;
  };

  /// The first batch that is not reduced on all of the rank's stages.
  std::int64_t reduced() const;
  static bool may_begin(const Stage& stage, std::int64_t reduced);
  static void begin(Stage& stage, Actions& placed);
  void begin_beside(Actions& placed);
  Stage& stage(int number);

  std::vector<Stage> stages_;  // those of the rank
};

}  // namespace hydra::schedule
