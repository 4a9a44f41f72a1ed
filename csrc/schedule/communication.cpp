#include "csrc/schedule/communication.h"

namespace hydra::schedule {

namespace {

/// `stage` if it exists, and is on another rank than `other`; otherwise kNoStage.
int elsewhere(const Schedule& schedule, int stage, int other) {
  const bool there = stage >= 0 && stage < schedule.stages();
  return there && schedule.rank_of(stage) != schedule.rank_of(other) ? stage : kNoStage;
}

/// Up the stages for values, down for gradients.
int direction(const Action& compute) { return compute.kind == ActionKind::kForward ? 1 : -1; }

Action of_kind(Action action, ActionKind kind) {
  action.kind = kind;
  return action;
}

}  // namespace

int received_from(const Schedule& schedule, const Action& compute) {
  return elsewhere(schedule, compute.stage - direction(compute), compute.stage);
}

int sent_to(const Schedule& schedule, const Action& compute) {
  return elsewhere(schedule, compute.stage + direction(compute), compute.stage);
}

Actions add_communication(const Schedule& schedule, const Actions& actions) {
  Actions added;
  const auto receive = [&](const Action& compute) {
    if (received_from(schedule, compute) != kNoStage) {
      const bool forward = compute.kind == ActionKind::kForward;
      added.push_back(of_kind(compute, forward ? ActionKind::kReceiveActivation : ActionKind::kReceiveGradient));
    }
  };
  std::size_t next = 0;  // where the first forward or backward without its receive may be
  const auto receive_next = [&] {
    while (next < actions.size() && !is_compute(actions[next].kind)) {
      ++next;
    }
    if (next < actions.size()) {
      receive(actions[next++]);
    }
  };
  receive_next();
  for (const Action& action : actions) {
    if (!is_compute(action.kind)) {
      added.push_back(action);
      continue;
    }
    receive_next();
    added.push_back(action);
    if (sent_to(schedule, action) != kNoStage) {
      const bool forward = action.kind == ActionKind::kForward;
      added.push_back(of_kind(action, forward ? ActionKind::kSendActivation : ActionKind::kSendGradient));
    }
  }
  return added;
}

}  // namespace hydra::schedule
