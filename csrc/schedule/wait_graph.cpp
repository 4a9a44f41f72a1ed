#include "csrc/schedule/wait_graph.h"

#include "csrc/schedule/communication.h"

namespace hydra::schedule {

namespace {

constexpr std::size_t kKinds = 9;

std::size_t number(ActionKind kind) { return static_cast<std::size_t>(kind); }

/// The action of a neighbouring stage that supplies the value of `action`, or receives it.
Action partner(const Schedule& schedule, const Action& action) {
  Action other = action;
  switch (action.kind) {
    case ActionKind::kForward:
      other.kind = received_from(schedule, action) == kNoStage ? ActionKind::kForward : ActionKind::kSendActivation;
      --other.stage;
      return other;
    case ActionKind::kBackward:
      other.kind = received_from(schedule, action) == kNoStage ? ActionKind::kBackward : ActionKind::kSendGradient;
      ++other.stage;
      return other;
    case ActionKind::kSendActivation:
      other.kind = ActionKind::kReceiveActivation;
      ++other.stage;
      return other;
    case ActionKind::kSendGradient:
      other.kind = ActionKind::kReceiveGradient;
      --other.stage;
      return other;
    default:
      other.stage = kNoStage;
      return other;
  }
}

}  // namespace

WaitGraph::WaitGraph(const Schedule& schedule, const std::vector<Actions>& ranks, const BatchIndex& batches)
    : schedule_(schedule), ranks_(ranks), batches_(batches) {
  std::vector<std::vector<std::size_t>> places(kKinds);  // by kind, and by stage and microbatch: the action's id
  std::size_t count = 0;
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    places[kind].assign(batches.microbatch_places(), kNothing);
  }
  for (const Actions& actions : ranks) {
    firsts_.push_back(count);
    for (const Action& action : actions) {
      places[number(action.kind)][batches.microbatch_place(action.stage, action.batch, action.microbatch)] = count++;
    }
  }
  awaited_.assign(count, kNothing);
  receivers_.assign(count, kNothing);
  std::size_t own = 0;
  for (const Actions& actions : ranks) {
    for (const Action& action : actions) {
      wait_for_values(places, own++, action);
    }
  }
}

void WaitGraph::wait_for_values(const std::vector<std::vector<std::size_t>>& places, std::size_t own,
                                const Action& action) {
  const Action other = partner(schedule_, action);
  if (other.stage < 0 || other.stage >= schedule_.stages()) {
    return;
  }
  const std::size_t place =
      places[number(other.kind)][batches_.microbatch_place(other.stage, other.batch, other.microbatch)];
  (is_send(action.kind) ? receivers_ : awaited_)[own] = place;
}

bool WaitGraph::ready(std::size_t own, const Action& action, bool rendezvous, const std::vector<bool>& done,
                      const std::vector<int>& reductions_left) const {
  if (action.kind == ActionKind::kFinishUpdate) {
    return reductions_left[index(action.batch)] == 0;
  }
  if (is_send(action.kind)) {
    return !rendezvous || receivers_[own] == kNothing || done[receivers_[own]];
  }
  return awaited_[own] == kNothing || done[awaited_[own]];
}

std::vector<std::size_t> WaitGraph::run(bool rendezvous, const std::function<void(int, std::size_t)>& run) const {
  std::vector<std::size_t> reached(ranks_.size(), 0);
  std::vector<bool> done(awaited_.size(), false);
  std::vector<int> reductions_left(index(batches_.batches()), schedule_.stages());
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (std::size_t& at = reached[rank]; at < ranks_[rank].size(); ++at) {
        const Action& action = ranks_[rank][at];
        const std::size_t own = firsts_[rank] + at;
        if (!ready(own, action, rendezvous, done, reductions_left)) {
          break;
        }
        run(static_cast<int>(rank), at);
        done[own] = true;
        reductions_left[index(action.batch)] -= action.kind == ActionKind::kReduce ? 1 : 0;
        moved = true;
      }
    }
  }
  return reached;
}

std::string WaitGraph::blocked(const std::vector<std::size_t>& reached) const {
  std::string lines;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (reached[rank] == ranks_[rank].size()) {
      continue;
    }
    const Action& action = ranks_[rank][reached[rank]];
    const bool update = action.kind == ActionKind::kFinishUpdate;
    lines += (lines.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) + " at its action " +
             std::to_string(reached[rank]) + ", " + in_words(action) + ", waits for " +
             (update ? "R of that batch on every stage" : token(partner(schedule_, action)));
  }
  return lines;
}

}  // namespace hydra::schedule
