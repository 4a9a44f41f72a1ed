#include "csrc/schedule/simulator.h"

#include <algorithm>
#include <cmath>

#include "csrc/base/errors.h"
#include "csrc/schedule/stream.h"
#include "csrc/schedule/verifier.h"
#include "csrc/schedule/wait_graph.h"

namespace hydra::schedule {

namespace {

void check(const char* what, const char* each, const std::vector<double>& costs, int count) {
  HYDRA_EXPECT(costs.size() == index(count), InvalidSchedule,
               std::string(what) + ": " + std::to_string(costs.size()) + " costs; " + std::to_string(count) +
                   " are needed, one for every " + each);
  for (const double cost : costs) {
    HYDRA_EXPECT(std::isfinite(cost) && cost >= 0, InvalidSchedule,
                 std::string(what) + ": a cost of " + std::to_string(cost) + " seconds; give 0 or more");
  }
}

void check(const Costs& costs, int stages) {
  check("forward", "stage", costs.forward, stages);
  check("backward", "stage", costs.backward, stages);
  check("update", "stage", costs.update, stages);
  check("reduce", "stage", costs.reduce, stages);
  check("transfer", "hop", costs.transfer, stages - 1);
  check("latency", "hop", costs.latency, stages - 1);
}

class Clock {
 public:
  Clock(const Schedule& schedule, const Costs& costs, const std::vector<Actions>& ranks, const BatchIndex& batches)
      : costs_(costs),
        ranks_(ranks),
        graph_(schedule, ranks, batches),
        times_(graph_.actions()),
        now_(ranks.size(), 0),
        reducing_until_(ranks.size(), 0),
        values_until_(costs.transfer.size(), 0),
        gradients_until_(costs.transfer.size(), 0),
        reduced_(index(schedule.stages()), std::vector<double>(index(batches.batches()), 0)) {}

  std::vector<TimedAction> run() {
    const auto reached = graph_.run(false, [this](int rank, std::size_t position) { take(rank, position); });
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      HYDRA_EXPECT(reached[rank] == ranks_[rank].size(), InvalidSchedule,
                   "ranks block each other: " + graph_.blocked(reached));
    }
    return std::move(times_);
  }

 private:
  void take(int rank, std::size_t position) {
    const Action& action = ranks_[index(rank)][position];
    const std::size_t stage = index(action.stage);
    double& now = now_[index(rank)];
    TimedAction timed{action, rank, now, now};
    switch (action.kind) {
      case ActionKind::kForward:
      case ActionKind::kBackward: {
        const std::size_t awaited = graph_.awaited(rank, position);
        timed.start = awaited == WaitGraph::kNothing ? now : std::max(now, times_[awaited].end);
        const auto& cost = action.kind == ActionKind::kForward ? costs_.forward : costs_.backward;
        now = timed.end = timed.start + cost[stage];
        break;
      }
      case ActionKind::kFinishUpdate:
        timed.start = std::max(now, reduced(stage, action.batch));
        now = timed.end = timed.start + costs_.update[stage];
        break;
      case ActionKind::kReduce:
        timed.start = std::max(now, reducing_until_[index(rank)]);
        timed.end = timed.start + costs_.reduce[stage];
        reducing_until_[index(rank)] = reduced_[stage][index(action.batch)] = timed.end;
        now = costs_.overlap ? now : timed.end;
        break;
      case ActionKind::kSendActivation:
        send(timed, stage, values_until_, now);
        break;
      case ActionKind::kSendGradient:
        send(timed, stage - 1, gradients_until_, now);
        break;
      default:
        break;
    }
    times_[graph_.id(rank, position)] = timed;
  }

  void send(TimedAction& timed, std::size_t hop, std::vector<double>& until, double& now) const {
    timed.start = std::max(now, until[hop]);
    until[hop] = timed.start + costs_.transfer[hop];
    timed.end = until[hop] + costs_.latency[hop];
    now = costs_.overlap ? now : timed.end;
  }

  double reduced(std::size_t stage, std::int64_t batch) const {
    double latest = reduced_[stage][index(batch)];
    for (std::size_t other = 0; costs_.global_norm && other < reduced_.size(); ++other) {
      latest = std::max(latest, reduced_[other][index(batch)]);
    }
    return latest;
  }

  const Costs& costs_;
  const std::vector<Actions>& ranks_;
  WaitGraph graph_;
  std::vector<TimedAction> times_;
  std::vector<double> now_;             // by rank
  std::vector<double> reducing_until_;  // by rank
  std::vector<double> values_until_;    // by hop: when it is free again
  std::vector<double> gradients_until_;
  std::vector<std::vector<double>> reduced_;  // by stage and batch
};

std::vector<TimedAction> run(const Schedule& schedule, const Costs& costs, int batches) {
  const std::vector<Actions> ranks = unroll(schedule, batches);
  const BatchIndex sizes(schedule.stages(), std::vector<int>(index(batches), schedule.microbatches()));
  return Clock(schedule, costs, ranks, sizes).run();
}

double last_end(const std::vector<TimedAction>& actions) {
  return std::ranges::max_element(actions, {}, &TimedAction::end)->end;
}

}  // namespace

Timeline simulate(const Schedule& schedule, const Costs& costs, int batches) {
  check(costs, schedule.stages());
  Timeline timeline;
  timeline.actions = run(schedule, costs, batches);
  timeline.makespan = timeline.period = last_end(timeline.actions);
  if (batches > 1) {
    // Filling and draining take the same time in both runs, so their difference is that of full steps.
    const int half = batches / 2;
    timeline.period = (timeline.makespan - last_end(run(schedule, costs, half))) / (batches - half);
  }
  timeline.busy.assign(index(schedule.ranks()), 0);
  for (const TimedAction& timed : timeline.actions) {
    const bool works = is_compute(timed.action.kind) || timed.action.kind == ActionKind::kFinishUpdate;
    timeline.busy[index(timed.rank)] += works ? timed.end - timed.start : 0;
  }
  for (const double busy : timeline.busy) {
    timeline.bubbles.push_back(timeline.period > 0 ? 1 - busy / batches / timeline.period : 0);
  }
  return timeline;
}

}  // namespace hydra::schedule
