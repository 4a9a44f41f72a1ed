// A schedule: for every rank, what it does in one step. Immutable.
//
// The step of batch t runs the bodies with t added to their actions' batches; actions of batches before the first are
// left out. After the last batch the bodies go on, without the actions of batches that do not come, until nothing is
// left: the drain.
#pragma once

#include <optional>
#include <string>

#include "csrc/schedule/action.h"
#include "csrc/schedule/recipe.h"
#include "csrc/schedule/version_rule.h"

namespace hydra::schedule {

class Schedule {
 public:
  /// `bodies` of ranks 0, 1, ...; batches of their actions are at most 0. Throws InvalidSchedule, with rank and action,
  /// for what is out of range, for a stage that is on two ranks or none, and for a rank without actions. Whether it can
  /// run is not asked here: verify() does.
  Schedule(int stages, int microbatches, VersionRule rule, std::vector<Actions> bodies);

  int stages() const noexcept { return static_cast<int>(ranks_.size()); }
  int ranks() const noexcept { return static_cast<int>(bodies_.size()); }
  int microbatches() const noexcept { return microbatches_; }
  VersionRule rule() const noexcept { return rule_; }
  const Actions& body(int rank) const;
  int rank_of(int stage) const;
  std::vector<int> stages_of(int rank) const;

  std::int64_t version_of(int stage, std::int64_t batch) const;
  /// Versions of the stage's weights that are held.
  int buffers(int stage) const;

  /// Whether a step leaves nothing behind for the next.
  bool flushes() const noexcept { return steps_behind_ == 0; }
  /// Steps after the last until nothing is left.
  int steps_behind() const noexcept { return steps_behind_; }
  /// Whether sends and receives are written in the bodies; else they are added to what comes of them.
  bool communicates() const noexcept { return communicates_; }
  /// Whether BU is written in the bodies; else likewise.
  bool begins_updates() const noexcept { return begins_updates_; }

  /// Set by make(): a recipe goes on where a body stops, with batches of other sizes.
  const std::optional<Recipe>& recipe() const noexcept { return recipe_; }

  /// A schedule by a built-in recipe.
  static Schedule make(const Recipe& recipe);

  /// By what they say, however they were made.
  bool operator==(const Schedule& other) const noexcept;

 private:
  void place(int rank, const Action& action);

  int microbatches_;
  VersionRule rule_;
  std::vector<Actions> bodies_;
  std::vector<int> ranks_;  // of each stage
  int steps_behind_ = 0;
  bool communicates_ = false;
  bool begins_updates_ = false;
  std::optional<Recipe> recipe_;
};

/// What is wrong with one action of a body, or nothing.
std::optional<std::string> problem_of(const Action& action, int stages, int microbatches);

}  // namespace hydra::schedule
