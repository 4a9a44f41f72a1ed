#include "csrc/plan/jobs/placed_lists.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace hydra {

PlacedLists::PlacedLists(const OptionTable& table, const JobLists& lists)
    : table_(table), choice_(lists.choice), node_(table.jobs()) {
  for (std::size_t job = 0; job < table.jobs(); ++job) {
    option_.push_back(table.option(job, choice_[job]));
    area_ += option_.back().area();
  }
  for (std::size_t node = 0; node < lists.jobs.size(); ++node) {
    NodeList& list = lists_.emplace_back();
    list.jobs = lists.jobs[node];
    for (const std::size_t job : list.jobs) {
      node_[job] = node;
    }
    list.free.assign(gpus_of(node), 0.0);
    place_from(list, gpus_of(node), 0);
    sum_ += list.sum;
  }
  scratch_.resize(static_cast<std::size_t>(table.largest_node()));
}

std::size_t PlacedLists::place_of(std::size_t job) const {
  const std::vector<std::size_t>& jobs = lists_[node_[job]].jobs;
  return static_cast<std::size_t>(std::find(jobs.begin(), jobs.end(), job) - jobs.begin());
}

std::size_t PlacedLists::last_node() const {
  const auto last = std::max_element(lists_.begin(), lists_.end(),
                                     [](const NodeList& a, const NodeList& b) { return a.end < b.end; });
  return static_cast<std::size_t>(last - lists_.begin());
}

double PlacedLists::cost() const { return cost_from(makespan(), sum_); }

double PlacedLists::cost_of(ListMove& move, double limit) {
  const double area = area_after(move);
  const double end = end_without(std::span(move.lists).first(move.list_count));
  if (cost_from(std::max(end, area / table_.gpus()), area) > limit) {
    return std::numeric_limits<double>::infinity();
  }
  exchange_choices(move);
  const double cost = cost_of_placed(move, end, limit - cost_from(0, area));
  exchange_choices(move);
  return cost;
}

/// Infinity if a job ends after `latest`.
double PlacedLists::cost_of_placed(const ListMove& move, double end, double latest) {
  double sum = sum_;
  for (std::size_t i = move.list_count; i-- > 0;) {  // a list that a job joins comes last, and mostly decides
    const std::optional<Outcome> outcome = outcome_of(move.lists[i], latest);
    if (!outcome) {
      return std::numeric_limits<double>::infinity();
    }
    end = std::max(end, outcome->end);
    sum += outcome->sum - lists_[move.lists[i].node].sum;
  }
  return cost_from(end, sum);
}

void PlacedLists::apply(ListMove& move) {
  area_ = area_after(move);
  exchange_choices(move);
  for (std::size_t i = 0; i < move.list_count; ++i) {
    const ListChange& change = move.lists[i];
    lists_[change.node].jobs = change.jobs;
    for (std::size_t place = change.from; place < change.jobs.size(); ++place) {
      node_[change.jobs[place]] = change.node;
    }
    place_from(lists_[change.node], gpus_of(change.node), change.from);
  }
  sum_ = 0;  // anew, so that roundings do not add up
  for (const NodeList& list : lists_) {
    sum_ += list.sum;
  }
}

JobLists PlacedLists::lists() const {
  JobLists found{choice_, {}};
  for (const NodeList& list : lists_) {
    found.jobs.push_back(list.jobs);
  }
  return found;
}

double PlacedLists::end_without(std::span<const ListChange> changed) const {
  double end = 0;
  for (std::size_t node = 0; node < lists_.size(); ++node) {
    if (std::none_of(changed.begin(), changed.end(), [&](const ListChange& change) { return change.node == node; })) {
      end = std::max(end, lists_[node].end);
    }
  }
  return end;
}

double PlacedLists::area_after(const ListMove& move) const {
  double area = area_;
  for (std::size_t i = 0; i < move.job_count; ++i) {
    area += table_.option(move.jobs[i], move.choices[i]).area() - option_[move.jobs[i]].area();
  }
  return area;
}

/// Makes the move's choices, and leaves those before them in it.
void PlacedLists::exchange_choices(ListMove& move) {
  for (std::size_t i = 0; i < move.job_count; ++i) {
    const std::size_t job = move.jobs[i];
    std::swap(choice_[job], move.choices[i]);
    option_[job] = table_.option(job, choice_[job]);
  }
}

std::optional<PlacedLists::Outcome> PlacedLists::outcome_of(const ListChange& change, double latest) {
  const std::size_t gpus = gpus_of(change.node);
  const std::span<double> free = std::span(scratch_).first(gpus);
  const auto before = lists_[change.node].free.begin() + static_cast<std::ptrdiff_t>(change.from * gpus);
  std::copy_n(before, gpus, free.begin());
  for (std::size_t place = change.from; place < change.jobs.size(); ++place) {
    const UsefulOption& option = option_[change.jobs[place]];
    if (occupy(free, option.gpus, option.seconds) + option.seconds > latest) {
      work_ += work_of(place + 1 - change.from, gpus);
      return std::nullopt;
    }
  }
  work_ += work_of(change.jobs.size() - change.from, gpus);
  return Outcome{free.back(), std::accumulate(free.begin(), free.end(), 0.0)};
}

void PlacedLists::place_from(NodeList& list, std::size_t gpus, std::size_t from) {
  list.free.resize((list.jobs.size() + 1) * gpus);
  for (std::size_t place = from; place < list.jobs.size(); ++place) {
    const std::span<double> before = std::span(list.free).subspan(place * gpus, gpus);
    const std::span<double> after = std::span(list.free).subspan((place + 1) * gpus, gpus);
    std::copy(before.begin(), before.end(), after.begin());
    const UsefulOption& option = option_[list.jobs[place]];
    occupy(after, option.gpus, option.seconds);
  }
  work_ += work_of(list.jobs.size() - from, gpus);
  const std::span<const double> last = std::span(list.free).last(gpus);
  list.end = last.back();
  list.sum = std::accumulate(last.begin(), last.end(), 0.0);
}

}  // namespace hydra
