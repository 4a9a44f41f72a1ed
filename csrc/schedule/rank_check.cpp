#include "csrc/schedule/rank_check.h"

#include <algorithm>

#include "csrc/base/errors.h"
#include "csrc/schedule/communication.h"

namespace hydra::schedule {

namespace {

constexpr unsigned bit(ActionKind kind) { return 1U << static_cast<unsigned>(kind); }

std::string version(std::int64_t number) { return "W(" + std::to_string(number) + ")"; }

/// The forward or backward whose value a send or receive carries.
Action compute_of(Action communication) {
  const bool forward =
      communication.kind == ActionKind::kSendActivation || communication.kind == ActionKind::kReceiveActivation;
  communication.kind = forward ? ActionKind::kForward : ActionKind::kBackward;
  return communication;
}

}  // namespace

RankCheck::RankCheck(const Schedule& schedule, const BatchIndex& batches, int rank, const Limits& limits)
    : schedule_(schedule),
      batches_(batches),
      rank_(rank),
      limits_(limits),
      taken_(batches.microbatch_places(), 0),
      stages_(index(schedule.stages())) {
  for (const int number : schedule.stages_of(rank)) {
    Stage& stage = stages_[index(number)];
    stage.uses_left.assign(index(batches.batches()) + 1, 0);
    stage.backwards.assign(index(batches.batches()), 0);
    stage.reduced.assign(index(batches.batches()), false);
    for (std::int64_t batch = 0; batch < batches.batches(); ++batch) {
      stage.uses_left[index(schedule.version_of(number, batch))] += batches.size(batch);
    }
    stage.now.versions = stage.peaks.versions = 1;
    ++now_.versions;
  }
  peaks_ = now_;
}

void RankCheck::fail(const Action& action, const std::string& problem) const {
  throw InvalidSchedule("rank " + std::to_string(rank_) + ", its action " + std::to_string(position_) + ", " +
                        in_words(action) + ": " + problem);
}

void RankCheck::expect(bool condition, const Action& action, const char* problem) const {
  if (!condition) {
    fail(action, problem);
  }
}

void RankCheck::take(const Action& action) {
  ++position_;
  if (action.stage < 0 || action.stage >= schedule_.stages() || schedule_.rank_of(action.stage) != rank_) {
    fail(action, "the stage does not live on this rank");
  }
  if (!batches_.has(action)) {
    fail(action, "there is no such microbatch");
  }
  if (in_place_ != kNoStage && (action.kind != ActionKind::kFinishUpdate || action.stage != in_place_)) {
    fail(action, "stage " + std::to_string(in_place_) + " is being updated in place: put its U right behind its BU");
  }
  in_place_ = kNoStage;
  switch (action.kind) {
    case ActionKind::kForward:
      return take_forward(action);
    case ActionKind::kBackward:
      return take_backward(action);
    case ActionKind::kReduce:
      return take_reduce(action);
    case ActionKind::kBeginUpdate:
      return take_begin(action);
    case ActionKind::kFinishUpdate:
      return take_update(action);
    default:
      return take_communication(action);
  }
}

bool RankCheck::taken(ActionKind kind, const Action& action) const {
  return (taken_[batches_.microbatch_place(action.stage, action.batch, action.microbatch)] & bit(kind)) != 0;
}

void RankCheck::take_once(const Action& action) {
  expect(!taken(action.kind, action), action, "it occurs twice; remove one");
  auto& bits = taken_[batches_.microbatch_place(action.stage, action.batch, action.microbatch)];
  bits = static_cast<std::uint16_t>(bits | bit(action.kind));
}

void RankCheck::take_forward(const Action& action) {
  take_once(action);
  expect(received_from(schedule_, action) == kNoStage || taken(ActionKind::kReceiveActivation, action), action,
         "its input was not received: put its RF before it");
  check_version(action);
  Stage& stage = stages_[index(action.stage)];
  change(stage, &Peaks::in_flight, 1);
  check_limits(action, stage);
}

void RankCheck::take_backward(const Action& action) {
  take_once(action);
  expect(taken(ActionKind::kForward, action), action, "its forward has not run: put F before it");
  expect(received_from(schedule_, action) == kNoStage || taken(ActionKind::kReceiveGradient, action), action,
         "its gradient was not received: put its RB before it");
  check_version(action);
  Stage& stage = stages_[index(action.stage)];
  // Two batches may use the same version, and then add to the same gradients.
  expect(action.batch == 0 || stage.reduced[index(action.batch - 1)], action,
         "the gradients of the previous batch are still being summed: put R of that batch before it");
  if (stage.backwards[index(action.batch)]++ == 0) {
    change(stage, &Peaks::gradients, 1);
  }
  change(stage, &Peaks::in_flight, -1);
  const std::int64_t used = schedule_.version_of(action.stage, action.batch);
  if (--stage.uses_left[index(used)] == 0 && used < stage.updates) {
    change(stage, &Peaks::versions, -1);
  }
  check_limits(action, stage);
}

void RankCheck::take_reduce(const Action& action) {
  Stage& stage = stages_[index(action.stage)];
  expect(!stage.reduced[index(action.batch)], action, "it occurs twice; remove one");
  const int missing = batches_.size(action.batch) - stage.backwards[index(action.batch)];
  if (missing > 0) {
    fail(action, "the gradients are not complete: " + std::to_string(missing) +
                     " of the batch's backwards on this stage come later; put R after the last");
  }
  stage.reduced[index(action.batch)] = true;
}

void RankCheck::take_begin(const Action& action) {
  Stage& stage = stages_[index(action.stage)];
  if (action.batch > stage.updates) {
    fail(action, "it needs " + version(action.batch) + ", but the newest version is " + version(stage.updates) +
                     ": put U of batch " + std::to_string(action.batch - 1) + " before it");
  }
  expect(action.batch == stage.updates && !stage.updating, action, "it occurs twice; remove one");
  for (const int number : schedule_.stages_of(rank_)) {
    if (!stages_[index(number)].reduced[index(action.batch)]) {
      fail(action, "the gradients of stage " + std::to_string(number) +
                       " were not reduced, and a rank sums those of all its stages together: put R" +
                       std::to_string(number) + " of that batch before it");
    }
  }
  stage.updating = true;
  if (schedule_.buffers(action.stage) == 1) {
    in_place_ = action.stage;
    return;
  }
  change(stage, &Peaks::versions, 1);
  check_limits(action, stage);
}

void RankCheck::take_update(const Action& action) {
  Stage& stage = stages_[index(action.stage)];
  if (action.batch != stage.updates) {
    fail(action, "updates are made in the order of batches, one for each; the next is that of batch " +
                     std::to_string(stage.updates));
  }
  expect(stage.reduced[index(action.batch)], action, "its gradients were not reduced: put R of that batch before it");
  expect(stage.updating, action, "it was not begun: put BU of that batch before it, or leave out all BU");
  const bool used_yet = stage.uses_left[index(stage.updates)] > 0;
  if (schedule_.buffers(action.stage) > 1 && !used_yet) {
    change(stage, &Peaks::versions, -1);
  }
  stage.updating = false;
  ++stage.updates;
  change(stage, &Peaks::gradients, -1);
}

void RankCheck::take_communication(const Action& action) {
  const Action compute = compute_of(action);
  take_once(action);
  if (is_send(action.kind)) {
    expect(sent_to(schedule_, compute) != kNoStage, action,
           "there is no stage on another rank to send to; leave it out");
    expect(taken(compute.kind, compute), action, "its value is not computed yet: put it after its F or B");
  } else {
    expect(received_from(schedule_, compute) != kNoStage, action,
           "there is no stage on another rank to receive from; leave it out");
    expect(!taken(compute.kind, compute), action, "it comes after the F or B that needs it; put it before");
  }
}

void RankCheck::check_version(const Action& action) const {
  const Stage& stage = stages_[index(action.stage)];
  const std::int64_t used = schedule_.version_of(action.stage, action.batch);
  if (used > stage.updates) {
    fail(action, "it uses " + version(used) + " (versions=" + name(schedule_.rule()) + "), but the newest version is " +
                     version(stage.updates) + ": put U of batch " + std::to_string(used - 1) + " before it");
  }
}

void RankCheck::change(Stage& stage, int Peaks::* what, int by) {
  stage.now.*what += by;
  now_.*what += by;
  stage.peaks.*what = std::max(stage.peaks.*what, stage.now.*what);
  peaks_.*what = std::max(peaks_.*what, now_.*what);
}

void RankCheck::check_limits(const Action& action, const Stage& stage) const {
  const auto check = [&](int there, int limit, const char* what) {
    if (there > limit) {
      fail(action, std::to_string(there) + " " + what + " on this stage, where the limit is " + std::to_string(limit));
    }
  };
  check(stage.now.in_flight, limits_.in_flight, "microbatches are in flight");
  check(stage.now.versions, limits_.versions, "versions are held");
  check(stage.now.gradients, limits_.gradients, "batches have gradients");
}

void RankCheck::end() const {
  const std::string where = "rank " + std::to_string(rank_) + ": ";
  for (const int number : schedule_.stages_of(rank_)) {
    for (std::int64_t batch = 0; batch < batches_.batches(); ++batch) {
      for (int microbatch = 0; microbatch < batches_.size(batch); ++microbatch) {
        for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward}) {
          const Action compute{kind, number, batch, microbatch};
          HYDRA_EXPECT(taken(kind, compute), InvalidSchedule, where + in_words(compute) + " is missing");
          const bool forward = kind == ActionKind::kForward;
          const ActionKind send = forward ? ActionKind::kSendActivation : ActionKind::kSendGradient;
          HYDRA_EXPECT(sent_to(schedule_, compute) == kNoStage || taken(send, compute), InvalidSchedule,
                       where + in_words({send, number, batch, microbatch}) + " is missing");
        }
      }
    }
    const std::int64_t updates = stages_[index(number)].updates;
    HYDRA_EXPECT(updates == batches_.batches(), InvalidSchedule,
                 where + in_words({ActionKind::kFinishUpdate, number, updates, 0}) + " is missing");
  }
}

}  // namespace hydra::schedule
