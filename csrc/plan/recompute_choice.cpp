#include "csrc/plan/recompute_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace hydra {

namespace {

constexpr std::size_t kMostStates = 200'000;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

/// The undominated choices among items, which are sorted by time per byte.
template <typename Item>
class ChoiceList {
 public:
  /// Looks for choices that save `needed` bytes and add less than `limit` time.
  ChoiceList(const std::vector<Item>& items, double needed, double limit)
      : items_(items), needed_(needed), limit_(limit) {
    sum_time_.push_back(0);
    sum_bytes_.push_back(0);
    for (const Item& item : items) {
      sum_time_.push_back(sum_time_.back() + item.time);
      sum_bytes_.push_back(sum_bytes_.back() + item.bytes);
    }
    states_.push_back({0, 0, kNone, kNone});
    std::vector<std::size_t> current = {0};
    for (std::size_t i = 0; i < items.size() && !current.empty(); ++i) {
      current = extended(current, i);
      if (states_.size() > kMostStates) {
        exact_ = false;
        return;
      }
    }
  }

  bool exact() const noexcept { return exact_; }
  bool found() const noexcept { return best_ != kNone; }

  /// Indices of the best choice's items.
  std::vector<std::size_t> chosen() const {
    std::vector<std::size_t> indices;
    for (std::size_t state = best_; states_[state].item != kNone; state = states_[state].before) {
      indices.push_back(states_[state].item);
    }
    return indices;
  }

 private:
  struct State {
    double time;
    double bytes;
    std::size_t item;
    std::size_t before;
  };

  /// The least time that items from `first` on add to save so many bytes, if an item may be split.
  double relaxed(std::size_t first, double bytes) const {
    const double target = sum_bytes_[first] + bytes;
    const auto last =
        std::lower_bound(sum_bytes_.begin() + static_cast<std::ptrdiff_t>(first), sum_bytes_.end(), target);
    if (last == sum_bytes_.end()) {
      return std::numeric_limits<double>::infinity();
    }
    const std::size_t end = static_cast<std::size_t>(last - sum_bytes_.begin());
    if (end == first) {
      return 0;
    }
    const double part = (target - sum_bytes_[end - 1]) / items_[end - 1].bytes;
    return sum_time_[end - 1] - sum_time_[first] + part * items_[end - 1].time;
  }

  bool promising(const State& state, std::size_t next) const {
    return state.time + relaxed(next, needed_ - state.bytes) < limit_;
  }

  /// The undominated states after item i, in ascending order of bytes and of time.
  std::vector<std::size_t> extended(const std::vector<std::size_t>& current, std::size_t i) {
    std::vector<std::size_t> all = current;
    for (const std::size_t before : current) {
      const State state = {states_[before].time + items_[i].time, states_[before].bytes + items_[i].bytes, i, before};
      if (state.bytes >= needed_) {
        if (state.time < limit_) {
          limit_ = state.time;
          states_.push_back(state);
          best_ = states_.size() - 1;
        }
      } else if (promising(state, i + 1)) {
        states_.push_back(state);
        all.push_back(states_.size() - 1);
      }
    }
    std::sort(all.begin(), all.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(states_[a].time, -states_[a].bytes) < std::pair(states_[b].time, -states_[b].bytes);
    });
    std::vector<std::size_t> kept;
    for (const std::size_t state : all) {
      if ((kept.empty() || states_[state].bytes > states_[kept.back()].bytes) && promising(states_[state], i + 1)) {
        kept.push_back(state);
      }
    }
    return kept;
  }

  const std::vector<Item>& items_;
  double needed_;
  double limit_;
  std::vector<double> sum_time_;
  std::vector<double> sum_bytes_;
  std::vector<State> states_;
  std::size_t best_ = kNone;
  bool exact_ = true;
};

}  // namespace

RecomputeChoice::RecomputeChoice(const LayerGraph& graph, double memory) : graph_(graph), memory_(memory) {}

const std::vector<RecomputeChoice::Item>& RecomputeChoice::items_of(int in_flight) {
  const auto [found, made] = items_.try_emplace(in_flight);
  std::vector<Item>& items = found->second;
  if (made) {
    for (std::size_t i = 0; i < graph_.layers.size(); ++i) {
      const LayerCost& base = graph_.layers[i].faster();
      const LayerCost& other = graph_.layers[i].slower();
      const Item item = {i, other.time - base.time, base.bytes(in_flight) - other.bytes(in_flight)};
      if (item.bytes > 0) {
        items.push_back(item);
      }
    }
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& a, const Item& b) { return a.time * b.bytes < b.time * a.bytes; });
  }
  return items;
}

RecomputeChoice::Knapsack RecomputeChoice::knapsack(const LayerSet& stage, int in_flight) {
  Knapsack made;
  made.excess_bytes = -memory_;
  for (const std::size_t layer : stage.layers()) {
    const LayerCost& base = graph_.layers[layer].faster();
    made.base_time += base.time;
    made.excess_bytes += base.bytes(in_flight);
  }
  if (made.excess_bytes <= 0) {
    return made;
  }
  for (const Item& item : items_of(in_flight)) {
    if (stage.has(item.layer)) {
      made.items.push_back(item);
    }
  }
  double missing = made.excess_bytes;
  std::size_t last = 0;
  while (last < made.items.size() && made.items[last].bytes < missing) {
    made.greedy.push_back(last);
    missing -= made.items[last].bytes;
    made.greedy_time += made.items[last].time;
    ++last;
  }
  made.possible = last < made.items.size();
  if (made.possible) {
    made.relaxed_time = made.greedy_time + missing / made.items[last].bytes * made.items[last].time;
    for (std::size_t i = last + 1; i < made.items.size(); ++i) {
      if (made.items[i].bytes >= missing && made.items[i].time < made.items[last].time) {
        last = i;
      }
    }
    made.greedy.push_back(last);
    made.greedy_time += made.items[last].time;
  }
  return made;
}

RecomputeChoice::Answer RecomputeChoice::fits_within(double time, const LayerSet& stage, int in_flight) {
  const Knapsack sack = knapsack(stage, in_flight);
  if (!sack.possible || sack.base_time + sack.relaxed_time > time) {
    return Answer::kNo;
  }
  if (sack.base_time + sack.greedy_time <= time) {
    return Answer::kYes;
  }
  const double above = std::nextafter(time - sack.base_time, std::numeric_limits<double>::infinity());
  const ChoiceList list(sack.items, sack.excess_bytes, above);
  if (list.found()) {
    return Answer::kYes;
  }
  return list.exact() ? Answer::kNo : Answer::kUnknown;
}

std::optional<RecomputeChoice::Choice> RecomputeChoice::fastest(const LayerSet& stage, int in_flight) {
  const Knapsack sack = knapsack(stage, in_flight);
  if (!sack.possible) {
    return std::nullopt;
  }
  const ChoiceList list(sack.items, sack.excess_bytes, sack.greedy_time);
  const std::vector<std::size_t> chosen =
      sack.excess_bytes <= 0 ? std::vector<std::size_t>() : (list.found() ? list.chosen() : sack.greedy);
  LayerSet other(graph_.layers.size());
  for (const std::size_t index : chosen) {
    other.add(sack.items[index].layer);
  }
  Choice choice;
  choice.exact = list.exact();
  for (const std::size_t layer : stage.layers()) {
    const Layer& costs = graph_.layers[layer];
    const LayerCost& way = other.has(layer) ? costs.slower() : costs.faster();
    choice.time += way.time;
    if (&way == &costs.recomputed) {
      choice.recomputed.push_back(layer);
    }
  }
  return choice;
}

}  // namespace hydra
