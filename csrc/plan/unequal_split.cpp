#include "csrc/plan/unequal_split.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "csrc/plan/chain.h"
#include "csrc/plan/stage_search.h"

namespace hydra {

namespace {

constexpr double kSame = 1e-10;            // relative
constexpr double kClose = 1e-3;            // relative; nearer bounds are no longer bisected before the last question
constexpr int kMostRounds = 8;             // in which downsets near the best plan's are added
constexpr std::size_t kFew = 4000;         // downsets that are searched at once
constexpr std::size_t kPrefixes = 1500;    // of one order
constexpr std::size_t kNeighbours = 3000;  // of all cuts together

bool is_amount(double value) { return std::isfinite(value) && value >= 0; }

void check(const LayerGraph& graph, const SplitTerms& terms) {
  HYDRA_EXPECT(!graph.layers.empty(), PlanError, "a graph without layers cannot be split");
  const auto is_cost = [](const LayerCost& cost) {
    return is_amount(cost.time) && is_amount(cost.bytes_per_microbatch) && is_amount(cost.fixed_bytes);
  };
  for (std::size_t i = 0; i < graph.layers.size(); ++i) {
    const Layer& layer = graph.layers[i];
    HYDRA_EXPECT(is_cost(layer.kept) && is_cost(layer.recomputed) && is_amount(layer.parameter_bytes), PlanError,
                 "layer " + std::to_string(i) + ": a time or a number of bytes is negative or not finite");
  }
  for (const LayerEdge& edge : graph.edges) {
    HYDRA_EXPECT(is_amount(edge.bytes), PlanError, "the bytes of an edge are negative or not finite");
  }
  HYDRA_EXPECT(is_amount(terms.memory), PlanError, "the memory is negative or not finite");
  HYDRA_EXPECT(terms.bandwidth > 0 && std::isfinite(terms.bandwidth), PlanError, "the bandwidth must be above zero");
  HYDRA_EXPECT(terms.devices > 0 && terms.microbatches > 0, PlanError, "a plan needs devices and microbatches");
}

/// Whether every sum of the search is a number.
void check_sums(const LayerGraph& graph, const SplitTerms& terms) {
  double time = 0;
  double bytes = 0;
  double crossing = 0;
  for (const Layer& layer : graph.layers) {
    time += layer.kept.time + layer.recomputed.time + 4 * layer.parameter_bytes / terms.bandwidth;
    bytes += layer.kept.bytes(terms.devices) + layer.recomputed.bytes(terms.devices) + layer.parameter_bytes;
  }
  for (const LayerEdge& edge : graph.edges) {
    crossing += 4 * edge.bytes;
  }
  HYDRA_EXPECT(std::isfinite(terms.devices * (time + crossing / terms.bandwidth)) && std::isfinite(bytes), PlanError,
               "the times or bytes of all layers together are no finite number: give smaller numbers");
}

/// What every plan takes: all layers on all devices, or the layer that takes longest by itself.
double simple_bound(const LayerGraph& graph, const SplitTerms& terms) {
  const std::vector<int> counts = replica_counts(terms);
  double total = 0;
  double longest = 0;
  for (const Layer& layer : graph.layers) {
    const double time = std::min(layer.kept.time, layer.recomputed.time);
    double alone = std::numeric_limits<double>::infinity();
    for (const int replicas : counts) {
      const double summed = 4.0 * (replicas - 1) / replicas * layer.parameter_bytes / terms.microbatches;
      alone = std::min(alone, summed / terms.bandwidth + time / replicas);
    }
    total += time;
    longest = std::max(longest, alone);
  }
  return std::max(total / std::min(terms.devices, terms.microbatches), longest);
}

/// The best plan so far, and what is known of others.
struct Progress {
  std::optional<StageSearch::Plan> best;
  double refuted = 0;  // no plan of the searched downsets takes less
};

/// Improves the best plan until none of these downsets is better, or the comparisons are used up.
void improve(StageSearch& search, Progress* progress) {
  bool last = progress->best.has_value();  // ask whether any plan is better: if there was a plan, perhaps none is
  if (!progress->best) {
    search.find(std::numeric_limits<double>::infinity(), &progress->best);
    if (!progress->best) {
      return;
    }
  }
  double low = progress->refuted;  // where bisection goes on, refuted or unknown
  bool certain = true;
  while (progress->best->time * (1 - kSame) > low) {
    const double best = progress->best->time;
    const double target = last ? best * (1 - kSame) : low + (best - low) / 2;
    std::optional<StageSearch::Plan> found;
    const StageSearch::Answer answer = search.find(target, &found);
    const bool better = answer == StageSearch::Answer::kFound && found->time < best;
    if (better) {
      progress->best = std::move(found);
    } else {
      low = target;
      certain = certain && answer == StageSearch::Answer::kRefuted;
      progress->refuted = certain ? target : progress->refuted;
    }
    last = progress->best->time - low <= kClose * best && !(last && better);
  }
}

std::vector<LayerSet> prefixes(const std::vector<std::size_t>& order) {
  const std::size_t step = order.size() / kPrefixes + 1;
  std::vector<LayerSet> found = {LayerSet(order.size())};
  LayerSet set = found.front();
  for (std::size_t i = 0; i < order.size(); ++i) {
    set.add(order[i]);
    if ((i + 1) % step == 0 || i + 1 == order.size()) {
      found.push_back(set);
    }
  }
  return found;
}

std::vector<LayerSet> some_downsets(const Precedence& precedence, const std::optional<StageSearch::Plan>& best) {
  std::vector<LayerSet> found = prefixes(precedence.depth_first());
  const std::vector<LayerSet> more = prefixes(precedence.breadth_first());
  found.insert(found.end(), more.begin(), more.end());
  if (best) {
    for (const LayerSet& cut : best->cuts) {
      const std::vector<LayerSet> near = precedence.neighbours(cut, kNeighbours / best->cuts.size() + 1);
      found.insert(found.end(), near.begin(), near.end());
    }
  }
  return found;
}

/// Searches downsets of some orders, and then those near the best plan's, until that helps no more.
void search_some(const LayerGraph& graph, const SplitTerms& terms, const Precedence& precedence, double comparisons,
                 Progress* progress) {
  double before = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kMostRounds; ++round) {
    progress->refuted = simple_bound(graph, terms);
    StageSearch search(graph, terms, some_downsets(precedence, progress->best), comparisons / kMostRounds);
    improve(search, progress);
    if (!progress->best || progress->best->time > before * (1 - kSame)) {
      return;
    }
    before = progress->best->time;
  }
}

}  // namespace

UnequalSplit split_unequally(const LayerGraph& graph, const SplitTerms& terms, const SearchLimits& limits) {
  check(graph, terms);
  check_sums(graph, terms);
  const Precedence precedence(graph);
  const double least = simple_bound(graph, terms);
  const std::optional<std::vector<LayerSet>> all = precedence.downsets(limits.downsets);
  Progress progress;
  if (!all || all->size() > kFew) {
    search_some(graph, terms, precedence, limits.comparisons / (all ? 4 : 1), &progress);
  }
  progress.refuted = least;
  if (all) {
    StageSearch search(graph, terms, *all, limits.comparisons);
    improve(search, &progress);
  }
  UnequalSplit split;
  if (progress.best) {
    split.time = progress.best->time;
    split.stages = std::move(progress.best->stages);
    split.bound = progress.refuted >= split.time * (1 - 2 * kSame) ? split.time : progress.refuted;
  }
  return split;
}

}  // namespace hydra
