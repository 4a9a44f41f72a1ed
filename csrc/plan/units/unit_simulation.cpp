#include "csrc/plan/units/unit_simulation.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <queue>
#include <tuple>

#include "csrc/plan/units/unit_bound.h"

namespace hydra {

namespace {

class Simulation {
 public:
  Simulation(const UnitBatch& batch, UnitPolicy policy, std::uint64_t seed)
      : scheduler_(batch, policy, seed),
        has_link_(batch.link.has_value()),
        turns_(static_cast<std::size_t>(batch.devices)) {
    schedule_.runs.resize(turns_.size());
    schedule_.busy_seconds.resize(turns_.size());
    free_.resize(turns_.size());
    std::iota(free_.begin(), free_.end(), std::size_t{0});
  }

  UnitSchedule run() {
    serve(0);
    while (!events_.empty()) {
      const double now = events_.top().time;
      free_.clear();
      for (; is_due(now, false); events_.pop()) {
        finish(events_.top().device);
      }
      serve(now);
      for (; is_due(now, true); events_.pop()) {
        scheduler_.ahead(events_.top().device, now);
        ends_.push_back(events_.top().device);
      }
      for (const std::size_t device : ends_) {
        events_.push({turns_[device].end, false, device});
      }
      ends_.clear();
    }
    schedule_.load_seconds = scheduler_.load_seconds();
    const double bound = units_bound(scheduler_.chains(), static_cast<std::int64_t>(turns_.size()));
    schedule_.bound = std::min(bound, schedule_.makespan);  // their sums round differently
    return std::move(schedule_);
  }

 private:
  struct Event {
    double time = 0;
    bool is_begin = false;  // ends come first
    std::size_t device = 0;

    bool operator>(const Event& other) const {
      return std::tie(time, is_begin, device) > std::tie(other.time, other.is_begin, other.device);
    }
  };

  bool is_due(double now, bool is_begin) const {
    return !events_.empty() && events_.top().time == now && events_.top().is_begin == is_begin;
  }

  void finish(std::size_t device) {
    scheduler_.finished(device);
    schedule_.makespan = turns_[device].end;  // ends come in the order of their times
    ++schedule_.units;
    free_.push_back(device);
  }

  /// A device that finds nothing is done: no more jobs are left than other devices run.
  void serve(double now) {
    for (const std::size_t device : free_) {
      if (const std::optional<UnitTurn> turn = scheduler_.next(device, now)) {
        begin(device, *turn, now);
      }
    }
  }

  void begin(std::size_t device, const UnitTurn& turn, double now) {
    std::vector<UnitRun>& runs = schedule_.runs[device];
    const bool goes_on = !runs.empty() && runs.back().job == turn.job && runs.back().last + 1 == turn.unit &&
                         turns_[device].end == turn.begin;
    if (goes_on) {
      ++runs.back().last;
    } else {
      runs.push_back({turn.job, turn.unit, turn.unit, turn.begin});
    }
    schedule_.busy_seconds[device] += turn.end - turn.begin;
    schedule_.stalled_seconds += turn.begin - now;
    turns_[device] = turn;
    events_.push(has_link_ ? Event{turn.begin, true, device} : Event{turn.end, false, device});
  }

  UnitScheduler scheduler_;
  bool has_link_;
  std::vector<UnitTurn> turns_;  // the last one of each device
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::size_t> free_;  // now, in their order
  std::vector<std::size_t> ends_;
  UnitSchedule schedule_;
};

}  // namespace

UnitSchedule simulate_units(const UnitBatch& batch, UnitPolicy policy, std::uint64_t seed) {
  return Simulation(batch, policy, seed).run();
}

}  // namespace hydra
