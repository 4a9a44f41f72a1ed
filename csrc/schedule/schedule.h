// A schedule: the actions of every rank in one step. Immutable.
//
// The step of batch t runs the bodies with t added to the batches of their actions; actions of batches before the first
// are left out. After the last batch the bodies repeat, without the actions of batches that do not come, until nothing
// is left: the drain.
#pragma once

#include <optional>
#include <string>

#include "csrc/schedule/action.h"
#include "csrc/schedule/recipe.h"
#include "csrc/schedule/version_rule.h"

namespace hydra::schedule {

class Schedule {
 public:
  /// `bodies`: those of ranks 0, 1, ...; the batches of their actions are at most 0. Throws InvalidSchedule, with rank
  /// and action, for a number out of range, for a stage on two ranks or none, and for a rank without actions. Only
  /// verify() checks whether the schedule can run.
  Schedule(int stages, int microbatches, VersionRule rule, std::vector<Actions> bodies);

  int stages() const noexcept { return static_cast<int>(ranks_.size()); }
  int ranks() const noexcept { return static_cast<int>(bodies_.size()); }
  int microbatches() const noexcept { return microbatches_; }
  VersionRule rule() const noexcept { return rule_; }
  const Actions& body(int rank) const;
  int rank_of(int stage) const;
  std::vector<int> stages_of(int rank) const;

  std::int64_t version_of(int stage, std::int64_t batch) const;
  /// How many versions of its weights the stage holds.
  int buffers(int stage) const;

  /// Whether a step leaves no actions of its batch for later steps.
  bool flushes() const noexcept { return steps_behind_ == 0; }
  /// The steps that a drain takes.
  int steps_behind() const noexcept { return steps_behind_; }
  /// Whether the bodies contain sends and receives; otherwise streams add them.
  bool communicates() const noexcept { return communicates_; }
  /// Whether the bodies contain BU; otherwise streams add it.
  bool begins_updates() const noexcept { return begins_updates_; }

  /// Set by make(): unlike bodies, a recipe can handle batches of other sizes.
  const std::optional<Recipe>& recipe() const noexcept { return recipe_; }

  /// A schedule by a built-in recipe.
  static Schedule make(const Recipe& recipe);

  /// Compares the contents, not the recipes.
  bool operator==(const Schedule& other) const noexcept;

 private:
  void place(int rank, const Action& action);

  int microbatches_;
  VersionRule rule_;
  std::vector<Actions> bodies_;
  std::vector<int> ranks_;  // by stage
  int steps_behind_ = 0;
  bool communicates_ = false;
  bool begins_updates_ = false;
  std::optional<Recipe> recipe_;
};

/// What is wrong with one action of a body; nullopt for a valid one.
std::optional<std::string> problem_of(const Action& action, int stages, int microbatches);

}  // namespace hydra::schedule
