#include "csrc/schedule/schedule.h"

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/schedule/generator.h"

namespace hydra::schedule {

namespace {

constexpr int kNowhere = -1;

void expect_range(const char* what, std::int64_t value, std::int64_t count) {
  HYDRA_EXPECT(
      value >= 0 && value < count, InvalidSchedule,
      std::string(what) + " " + std::to_string(value) + " was asked for; there are 0 to " + std::to_string(count - 1));
}

}  // namespace

std::optional<std::string> problem_of(const Action& action, int stages, int microbatches) {
  if (action.stage < 0 || action.stage >= stages) {
    return "stage " + std::to_string(action.stage) + "; there are 0 to " + std::to_string(stages - 1);
  }
  const bool up = action.kind == ActionKind::kSendActivation || action.kind == ActionKind::kReceiveGradient;
  const bool down = action.kind == ActionKind::kSendGradient || action.kind == ActionKind::kReceiveActivation;
  if ((up && action.stage == stages - 1) || (down && action.stage == 0)) {
    return std::string("there is no stage ") + (up ? "after" : "before") + " it to exchange anything with";
  }
  const int count = is_of_batch(action.kind) ? 1 : microbatches;
  if (action.microbatch < 0 || action.microbatch >= count) {
    return "microbatch " + std::to_string(action.microbatch) + "; there are 0 to " + std::to_string(count - 1);
  }
  if (action.batch > 0 || action.batch < -kMostStages) {
    return "batch " + std::to_string(action.batch) + ", counted from that of the step; give 0 to -" +
           std::to_string(kMostStages);
  }
  return std::nullopt;
}

Schedule::Schedule(int stages, int microbatches, VersionRule rule, std::vector<Actions> bodies)
    : microbatches_(microbatches), rule_(rule), bodies_(std::move(bodies)) {
  HYDRA_EXPECT(stages >= 1 && stages <= kMostStages && microbatches >= 1 && microbatches <= kMostMicrobatches,
               InvalidSchedule,
               "a schedule with stages=" + std::to_string(stages) + ", microbatches=" + std::to_string(microbatches) +
                   "; give 1 to " + std::to_string(kMostStages) + " and 1 to " + std::to_string(kMostMicrobatches));
  ranks_.assign(index(stages), kNowhere);
  for (int rank = 0; rank < ranks(); ++rank) {
    HYDRA_EXPECT(!bodies_[index(rank)].empty(), InvalidSchedule,
                 "rank " + std::to_string(rank) + " has no actions; give every rank a stage, or use fewer ranks");
    for (const Action& action : bodies_[index(rank)]) {
      place(rank, action);
    }
  }
  const auto missing = std::ranges::find(ranks_, kNowhere);
  HYDRA_EXPECT(missing == ranks_.end(), InvalidSchedule,
               "stage " + std::to_string(missing - ranks_.begin()) + " of " + std::to_string(stages) +
                   " is on no rank; give its actions to one rank");
}

void Schedule::place(int rank, const Action& action) {
  const auto problem = problem_of(action, stages(), microbatches_);
  HYDRA_EXPECT(!problem, InvalidSchedule, "rank " + std::to_string(rank) + ", " + token(action) + ": " + *problem);
  int& home = ranks_[index(action.stage)];
  HYDRA_EXPECT(home == kNowhere || home == rank, InvalidSchedule,
               "rank " + std::to_string(rank) + ", " + token(action) + ": stage " + std::to_string(action.stage) +
                   " is on rank " + std::to_string(home) + " already; a stage lives on one rank");
  home = rank;
  steps_behind_ = std::max(steps_behind_, static_cast<int>(-action.batch));
  communicates_ = communicates_ || is_communication(action.kind);
  begins_updates_ = begins_updates_ || action.kind == ActionKind::kBeginUpdate;
}

const Actions& Schedule::body(int rank) const {
  expect_range("rank", rank, ranks());
  return bodies_[index(rank)];
}

int Schedule::rank_of(int stage) const {
  expect_range("stage", stage, stages());
  return ranks_[index(stage)];
}

std::vector<int> Schedule::stages_of(int rank) const {
  expect_range("rank", rank, ranks());
  std::vector<int> found;
  for (int stage = 0; stage < stages(); ++stage) {
    if (ranks_[index(stage)] == rank) {
      found.push_back(stage);
    }
  }
  return found;
}

std::int64_t Schedule::version_of(int stage, std::int64_t batch) const {
  expect_range("stage", stage, stages());
  HYDRA_EXPECT(batch >= 0, InvalidSchedule, "batch " + std::to_string(batch) + " was asked for; the first is 0");
  return schedule::version_of(rule_, stages(), stage, batch);
}

int Schedule::buffers(int stage) const {
  expect_range("stage", stage, stages());
  return schedule::buffers(rule_, stages(), stage);
}

Schedule Schedule::make(const Recipe& recipe) {
  std::vector<Actions> bodies(index(recipe.ranks));
  // From this step on no batch lies before the first. The actions that a stage still owes to earlier batches are at
  // most those of a microbatch a stage (pipedream), or of two batches.
  const std::int64_t steady = std::max(recipe.stages, 2);
  for (int rank = 0; rank < recipe.ranks; ++rank) {
    Generator generator(recipe, rank);
    Actions& body = bodies[index(rank)];
    while (generator.batches() <= steady) {
      body = generator.next_batch(recipe.microbatches);
    }
    for (Action& action : body) {
      action.batch -= steady;
    }
  }
  Schedule schedule(recipe.stages, recipe.microbatches, recipe.rule(), std::move(bodies));
  schedule.recipe_ = recipe;
  return schedule;
}

bool Schedule::operator==(const Schedule& other) const noexcept {
  return stages() == other.stages() && microbatches_ == other.microbatches_ && rule_ == other.rule_ &&
         bodies_ == other.bodies_;
}

}  // namespace hydra::schedule
