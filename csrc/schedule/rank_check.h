// What can be said of one rank's actions alone: each once, in an order that makes sense, with versions that are there.
//
// That a version is there when a forward runs is looked up. That it is not written over before its last backward
// follows: updates come in the order of batches, each is begun after all backwards of its batch, and the update that
// writes over a version is that of the last batch that uses it (version_rule.h: a stage holds one version more than its
// rule's delay). Likewise gradients are summed batch by batch: a batch is reduced before the next one's first backward.
//
// Where updates may begin is looked up: the three conditions of update_placer.h.
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

  /// Of a stage that lives on the rank.
  const Peaks& peaks_of(int stage) const { return stages_[index(stage)].peaks; }
  const Peaks& peaks() const noexcept { return peaks_; }

 private:
  struct Stage {
    Peaks now;
    Peaks peaks;
    std::int64_t updates = 0;    // so the newest version is W(updates)
    bool updating = false;       // the next one has begun
    std::vector<int> uses_left;  // of each version: backwards yet to run with it
    std::vector<int> backwards;  // of each batch
    std::vector<bool> reduced;   // likewise
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
  std::vector<std::uint16_t> taken_;  // of each microbatch on each stage: a bit for each kind
  std::vector<Stage> stages_;         // all of the schedule's; only the rank's own are used
  Peaks now_;
  Peaks peaks_;
  int in_place_ = kNoStage;  // the stage whose update has to end with the next action
  std::int64_t position_ = -1;
};

}  // namespace hydra::schedule
