// Checks the actions of one rank by themselves: each occurs once, their order is valid, and the versions they use
// exist.
//
// The check tests whether a version exists when a forward runs. It need not test whether a version is overwritten
// before its last backward: updates come in the order of batches, each begins after all backwards of its batch, and the
// update that overwrites a version is that of the last batch that uses it. (A stage holds one version more than the
// delay of its rule: version_rule.h.) Gradients are summed batch by batch too: a batch is reduced before the first
// backward of the next.
//
// Updates may begin only under the three conditions of update_placer.h, which are checked.
#pragma once

#include <vector>

#include "csrc/schedule/batch_index.h"
#include "csrc/schedule/communication.h"
#include "csrc/schedule/verifier.h"

namespace hydra::schedule {

class RankCheck {
 public:
  RankCheck(const Schedule& schedule, const BatchIndex& batches, int rank, const Limits& limits);

  /// Takes the rank's next action. Throws InvalidSchedule.
  void take(const Action& action);
  /// Throws InvalidSchedule unless everything was taken.
  void end() const;

  /// The peaks of one stage, which has to be on this rank.
  const Peaks& peaks_of(int stage) const { return stages_[index(stage)].peaks; }
  const Peaks& peaks() const noexcept { return peaks_; }

 private:
  struct Stage {
    Peaks now;
    Peaks peaks;
    std::int64_t updates = 0;    // made so far: the newest version is W(updates)
    bool updating = false;       // the next update has begun
    std::vector<int> uses_left;  // by version: backwards yet to run with it
    std::vector<int> backwards;  // by batch: those taken
    std::vector<bool> reduced;   // by batch
  };

  [[noreturn]] void fail(const Action& action, const std::string& problem) const;
  void expect(bool condition, const Action& action, const char* problem) const;
  bool taken(ActionKind kind, const Action& action) const;
  void take_once(const Action& action);
  void take_forward(const Action& action);
  void take_backward(const Action& action);
  void take_reduce(const Action& action);
  void take_begin(const Action& action);
  void take_update(const Action& action);
  void take_communication(const Action& action);
  void check_version(const Action& action) const;
  void change(Stage& stage, int Peaks::* what, int by);
  void check_limits(const Action& action, const Stage& stage) const;

  const Schedule& schedule_;
  const BatchIndex& batches_;
  const int rank_;
  const Limits limits_;
  std::vector<std::uint16_t> taken_;  // by stage and microbatch: one bit for each kind of action
  std::vector<Stage> stages_;         // all stages of the schedule; only those on the rank are used
  Peaks now_;
  Peaks peaks_;
  int in_place_ = kNoStage;  // the stage whose U has to be the next action
  std::int64_t position_ = -1;
};

}  // namespace hydra::schedule
