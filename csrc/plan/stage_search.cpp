#include "csrc/plan/stage_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "csrc/plan/chain.h"

namespace hydra {

namespace {

constexpr int kUnreachable = std::numeric_limits<int>::max();
constexpr double kKnapsack = 5;           // comparisons that a knapsack costs, for each layer
constexpr double kRounding = 1e-9;        // of a number of replicas
constexpr double kLimitRounding = 1e-12;  // relative, of bytes that are not whole numbers

/// Whether the bytes of any layers have the same sum in any order: all are multiples of one power of two, and few bits
/// hold the largest sum.
bool sums_are_exact(const LayerGraph& graph, int in_flight) {
  double total = 0;
  for (const Layer& layer : graph.layers) {
    total += layer.kept.bytes(in_flight) + layer.recomputed.bytes(in_flight);
  }
  int bits = 0;  // before the point
  std::frexp(total, &bits);
  const auto is_multiple = [&](double bytes) {
    return std::ldexp(bytes, 52 - bits) == std::trunc(std::ldexp(bytes, 52 - bits));
  };
  return std::ranges::all_of(graph.layers, [&](const Layer& layer) {
    return is_multiple(layer.kept.bytes_per_microbatch) && is_multiple(layer.kept.fixed_bytes) &&
           is_multiple(layer.recomputed.bytes_per_microbatch) && is_multiple(layer.recomputed.fixed_bytes);
  });
}

/// The memory that stages are compared with. If sums depend on their order, a plan keeps off the limit.
double usable_memory(const LayerGraph& graph, const SplitTerms& terms) {
  const bool exact = sums_are_exact(graph, std::min(terms.devices, terms.microbatches));
  return exact ? terms.memory : terms.memory * (1 - kLimitRounding);
}

}  // namespace

std::vector<int> replica_counts(const SplitTerms& terms) {
  std::vector<int> found;
  for (int low = 1; low <= terms.microbatches / low; ++low) {
    if (terms.microbatches % low == 0) {
      found.push_back(low);
      found.push_back(terms.microbatches / low);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  std::erase_if(found, [&](int count) { return count > terms.devices; });
  return found;
}

StageSearch::StageSearch(const LayerGraph& graph, const SplitTerms& terms, std::vector<LayerSet> downsets,
                         double comparisons)
    : graph_(graph),
      terms_(terms),
      memory_(usable_memory(graph, terms)),
      most_replicas_(std::min(terms.devices, terms.microbatches)),
      counts_(replica_counts(terms)),
      table_(graph, std::move(downsets)),
      recompute_(graph, memory_),
      comparisons_left_(comparisons) {}

StageSearch::Answer StageSearch::find(double time, std::optional<Plan>* plan) {
  begin(time);
  const std::vector<Outside>& outside = question_.outside;
  for (std::size_t larger = table_.size() - 1; larger > 0 && outside[0].replicas == kUnreachable; --larger) {
    if (outside[larger].replicas != kUnreachable) {
      extend(larger);
      if (comparisons_left_ <= 0) {
        return Answer::kUnknown;
      }
    }
  }
  if (outside[0].replicas == kUnreachable) {
    return question_.unknown ? Answer::kUnknown : Answer::kRefuted;
  }
  *plan = plan_found();
  return Answer::kFound;
}

void StageSearch::begin(double time) {
  question_.time = time;
  question_.unknown = false;
  question_.outside.assign(table_.size(), {kUnreachable, 0, 0, 0});
  question_.outside.back().replicas = 0;
  question_.keys.clear();
  for (std::size_t i = 0; i < table_.size(); ++i) {
    const double own = table_.sums(i).fastest_time / time;
    const double needed = std::ceil(std::min(own, most_replicas_ + 1.0) - kRounding);
    question_.outside[i].room = most_replicas_ - static_cast<int>(needed);
    question_.keys.push_back(question_.outside[i].room + own + kRounding);
  }
}

void StageSearch::extend(std::size_t larger) {
  // Worth a try: what is outside `larger`, and the time of the layers between, leave room.
  const double least = question_.outside[larger].replicas + table_.sums(larger).fastest_time / question_.time;
  const std::size_t end = table_.first_of_size(larger);
  comparisons_left_ -= static_cast<double>(end);
  question_.worth.clear();
  for (std::size_t smaller = 0; smaller < end; ++smaller) {
    if (question_.keys[smaller] >= least) {
      question_.worth.push_back(smaller);
    }
  }
  for (const std::size_t smaller : question_.worth) {
    try_stage(smaller, larger);
  }
}

void StageSearch::try_stage(std::size_t smaller, std::size_t larger) {
  const LayerSums stage = table_.sums(larger) - table_.sums(smaller);
  const int later = question_.outside[larger].replicas;
  Outside& outside = question_.outside[smaller];
  const auto end = std::upper_bound(counts_.begin(), counts_.end(), outside.room - later);
  auto count = std::lower_bound(counts_.begin(), end, stage.fastest_time / question_.time - kRounding);
  if (count == end || stage.bytes_at_least(in_flight(later, end[-1])) > terms_.memory ||
      !table_.set(smaller).within(table_.set(larger))) {
    return;
  }
  const double crossing = table_.crossing_bytes(smaller, larger);
  for (; count != end; ++count) {
    if (allowed(smaller, larger, *count, stage, crossing)) {
      const int replicas = later + *count;
      question_.keys[smaller] += replicas - 1 - outside.room;
      outside = {replicas, larger, *count, replicas - 1};
      return;
    }
  }
}

bool StageSearch::allowed(std::size_t smaller, std::size_t larger, int replicas, const LayerSums& stage,
                          double crossing_bytes) {
  const double left = question_.time - communication(crossing_bytes, stage.parameter_bytes, replicas);
  const int held = in_flight(question_.outside[larger].replicas, replicas);
  if (stage.fastest_time > left * replicas || stage.bytes_at_least(held) > terms_.memory) {
    return false;
  }
  if (stage.fastest_bytes(held) <= memory_) {
    return true;
  }
  comparisons_left_ -= kKnapsack * static_cast<double>(graph_.layers.size());
  const LayerSet layers = table_.set(larger).without(table_.set(smaller));
  const RecomputeChoice::Answer answer = recompute_.fits_within(left * replicas, layers, held);
  question_.unknown = question_.unknown || answer == RecomputeChoice::Answer::kUnknown;
  return answer == RecomputeChoice::Answer::kYes;
}

double StageSearch::communication(double crossing_bytes, double parameter_bytes, int replicas) const {
  const double summed = 4.0 * (replicas - 1) / replicas * parameter_bytes / terms_.microbatches;
  return (2 * crossing_bytes / replicas + summed) / terms_.bandwidth;
}

StageSearch::Plan StageSearch::plan_found() {
  Plan plan;
  for (std::size_t set = 0; set + 1 < table_.size(); set = question_.outside[set].larger) {
    const Outside& step = question_.outside[set];
    const int later = question_.outside[step.larger].replicas;
    const LayerSet stage = table_.set(step.larger).without(table_.set(set));
    double crossing = 0;
    for (const LayerEdge& edge : graph_.edges) {
      crossing += stage.has(edge.from) != stage.has(edge.to) ? edge.bytes : 0;
    }
    double parameter_bytes = 0;
    for (const std::size_t layer : stage.layers()) {
      parameter_bytes += graph_.layers[layer].parameter_bytes;
    }
    const auto choice = recompute_.fastest(stage, in_flight(later, step.first_replicas));
    HYDRA_EXPECT(choice.has_value(), PlanError, "a stage was planned that does not fit: this is an error of hydra_ext");
    const double time =
        communication(crossing, parameter_bytes, step.first_replicas) + choice->time / step.first_replicas;
    plan.time = std::max(plan.time, time);
    plan.stages.push_back({step.first_replicas, stage.layers(), choice->recomputed});
    plan.cuts.push_back(table_.set(step.larger));
  }
  return plan;
}

}  // namespace hydra
