#include "csrc/schedule/verifier.h"

#include <algorithm>
#include <string>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/schedule/rank_check.h"
#include "csrc/schedule/stream.h"
#include "csrc/schedule/wait_graph.h"

namespace hydra::schedule {

namespace {

/// The actions of one kind of one stage, in their order.
Actions of_kind(const Actions& actions, ActionKind kind, int stage) {
  Actions found;
  std::ranges::copy_if(actions, std::back_inserter(found),
                       [&](const Action& action) { return action.kind == kind && action.stage == stage; });
  return found;
}

void check_queue(const Schedule& schedule, const std::vector<Actions>& ranks, ActionKind send, int from,
                 ActionKind receive, int to) {
  const Actions sent = of_kind(ranks[index(schedule.rank_of(from))], send, from);
  const Actions received = of_kind(ranks[index(schedule.rank_of(to))], receive, to);
  const std::string queue = "from stage " + std::to_string(from) + " to stage " + std::to_string(to);
  for (std::size_t at = 0; at < std::max(sent.size(), received.size()); ++at) {
    HYDRA_EXPECT(at < sent.size() && at < received.size(), InvalidSchedule,
                 queue + ": " + std::to_string(sent.size()) + " sends and " + std::to_string(received.size()) +
                     " receives; every value that crosses has one of each");
    HYDRA_EXPECT(sent[at].batch == received[at].batch && sent[at].microbatch == received[at].microbatch,
                 InvalidSchedule,
                 queue + ", value " + std::to_string(at) + ": " + in_words(sent[at]) + " is sent, where " +
                     in_words(received[at]) + " is received; both ends have to use the same order");
  }
}

void check_queues(const Schedule& schedule, const std::vector<Actions>& ranks) {
  for (int stage = 0; stage + 1 < schedule.stages(); ++stage) {
    check_queue(schedule, ranks, ActionKind::kSendActivation, stage, ActionKind::kReceiveActivation, stage + 1);
    check_queue(schedule, ranks, ActionKind::kSendGradient, stage + 1, ActionKind::kReceiveGradient, stage);
  }
}

bool all_at_end(const std::vector<Actions>& ranks, const std::vector<std::size_t>& reached) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (reached[rank] < ranks[rank].size()) {
      return false;
    }
  }
  return true;
}

/// Checks the counts first: memory is allocated by the numbers of stages and microbatches, which the bodies must match.
void check_counts(const Schedule& schedule) {
  const std::int64_t wanted = std::int64_t{schedule.stages()} * schedule.microbatches();
  for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward}) {
    std::int64_t there = 0;
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      there += std::ranges::count(schedule.body(rank), kind, &Action::kind);
    }
    HYDRA_EXPECT(there == wanted, InvalidSchedule,
                 "the bodies have " + std::to_string(there) + " actions " + letters(kind) + ", where " +
                     std::to_string(schedule.stages()) + " stages with " + std::to_string(schedule.microbatches()) +
                     " microbatches have " + std::to_string(wanted));
  }
}

}  // namespace

Verification verify(const Schedule& schedule, const Limits& limits) {
  check_counts(schedule);
  int behind = schedule.steps_behind();
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    behind = std::max(behind, delay(schedule.rule(), schedule.stages(), stage));
  }
  // Long enough for a steady state between start and drain.
  const int batches = 2 * behind + 3;
  return verify(schedule, unroll(schedule, batches), std::vector<int>(index(batches), schedule.microbatches()), limits);
}

Verification verify(const Schedule& schedule, const std::vector<Actions>& ranks, std::vector<int> sizes,
                    const Limits& limits) {
  HYDRA_EXPECT(
      ranks.size() == index(schedule.ranks()), InvalidSchedule,
      "actions of " + std::to_string(ranks.size()) + " ranks for a schedule of " + std::to_string(schedule.ranks()));
  HYDRA_EXPECT(std::ranges::all_of(sizes, [](int size) { return size >= 1; }), InvalidSchedule,
               "a batch without microbatches; leave it out");
  const BatchIndex batches(schedule.stages(), std::move(sizes));
  Verification found;
  found.stages.resize(index(schedule.stages()));
  found.batches = static_cast<int>(batches.batches());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    RankCheck check(schedule, batches, rank, limits);
    for (const Action& action : ranks[index(rank)]) {
      check.take(action);
    }
    check.end();
    for (const int stage : schedule.stages_of(rank)) {
      found.stages[index(stage)] = check.peaks_of(stage);
    }
    found.ranks.push_back(check.peaks());
  }
  check_queues(schedule, ranks);
  const WaitGraph graph(schedule, ranks, batches);
  const auto reached = graph.run(false, [](int, std::size_t) {});
  HYDRA_EXPECT(all_at_end(ranks, reached), InvalidSchedule, "ranks block each other: " + graph.blocked(reached));
  found.rendezvous = all_at_end(ranks, graph.run(true, [](int, std::size_t) {}));
  return found;
}

}  // namespace hydra::schedule
