#include "csrc/plan/cuts/pipeline_partition.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>

#include "csrc/plan/cuts/cut_family.h"
#include "csrc/plan/cuts/cut_relaxation.h"

namespace hydra {

namespace {

constexpr double kExactPlan = 1e-11;  // relative: values that are closer are one
constexpr double kClosePlan = 1e-6;   // relative: better plans are looked for up to this
constexpr double kCoarsePlan = 1e-3;  // relative: for the first plan
constexpr double kCloseBound = 1e-4;  // relative: how well the bound of a relaxation is known
constexpr double kLongestPlan = 1e15;

/// How much is searched, on one level and on two. Chosen so that graphs of a thousand nodes take seconds.
struct PartitionLimits {
  std::size_t all_sets;    // of a graph whose closed sets are all searched at once
  std::size_t known_sets;  // of a graph whose closed sets are listed
  std::size_t family;
  std::size_t cells;
  std::size_t boxes;
};

constexpr PartitionLimits kOneLevel{3000, 300000, 2000, 2000, 4000};
constexpr PartitionLimits kTwoLevels{3000, 300000, 250, 500, 1500};
constexpr std::int64_t kMostWork = 7'000'000'000;  // steps; a round that may be too long is not begun
constexpr std::int64_t kOrderWork = 500'000'000;   // for the first plan

void check_pipeline_terms(const PipelineTerms& terms) {
  HYDRA_EXPECT(terms.levels.size() == 1 || terms.levels.size() == 2, PlanError,
               "a pipeline on " + std::to_string(terms.levels.size()) + " levels of machines: give one level or two");
  for (const PipelineLevel& level : terms.levels) {
    HYDRA_EXPECT(
        level.machines >= 1 && level.machines <= kMostMachines, PlanError,
        "a level of " + std::to_string(level.machines) + " machines: give 1 to " + std::to_string(kMostMachines));
    HYDRA_EXPECT(
        std::isfinite(level.bytes_per_second) && level.bytes_per_second > 0, PlanError,
        "a link of " + std::to_string(level.bytes_per_second) + " bytes per second: give a finite number above 0");
  }
  HYDRA_EXPECT(!terms.memory_cap || *terms.memory_cap >= 0, PlanError,
               "a memory cap of " + std::to_string(terms.memory_cap.value_or(0)) + " bytes: give a number from 0");
}

/// A value that every plan meets.
double longest_plan(const ProfileGraph& graph, const PipelineTerms& terms) {
  double found = 0;
  double parameters = 0;
  double activations = 0;
  for (int node = 0; node < graph.size(); ++node) {
    found += graph.node(node).compute_ms;
    parameters += graph.node(node).parameter_bytes;
    activations += graph.node(node).activation_bytes;
  }
  for (const PipelineLevel& level : terms.levels) {
    found += (4 * parameters + 2 * activations) / (level.bytes_per_second / 1000);
  }
  return found;
}

PipelineStage stage_of(const ProfileGraph& graph, const ChosenStage& chosen) {
  PipelineStage stage;
  stage.replicas = chosen.replicas;
  for (const int node : graph.order()) {
    if (chosen.after.has(node) && !chosen.before.has(node)) {
      stage.nodes.push_back(node);
    }
  }
  for (const ChosenStage& inside : chosen.inner) {
    stage.inner.push_back(stage_of(graph, inside));
  }
  return stage;
}

/// The sets that the nodes form one after the other. `choose` returns the next one of the nodes that can be added.
template <typename Choose>
std::vector<NodeSet> set_prefixes(const ProfileGraph& graph, const Choose& choose) {
  std::vector<NodeSet> found;
  NodeSet set(graph.size());
  for (int i = 0; i < graph.size(); ++i) {
    set.add(choose(set));
    found.push_back(set);
  }
  return found;
}

/// Looks for better plans in one family after another, and for a bound.
class PartitionSearch {
 public:
  PartitionSearch(const ProfileGraph& graph, const PipelineTerms& terms)
      : graph_(graph), terms_(terms), limits_(terms.levels.size() == 1 ? kOneLevel : kTwoLevels) {}

  PipelinePartition run() {
    const auto sets = graph_.closed_sets(limits_.known_sets);
    if (sets && sets->size() <= limits_.all_sets) {
      if (sets->size() > 2 * limits_.family) {
        improve(thin(*sets), kClosePlan);  // with a good plan, the search among all sets drops most
      }
      improve(*sets, kExactPlan);
      bound_ = best_.value;
    } else {
      search_orders();
      search_families(sets);
    }
    PipelinePartition found;
    found.objective_ms = best_.value;
    found.bound_ms = !best_.stages.empty() && is_proved() ? best_.value : bound_;
    for (const ChosenStage& chosen : best_.stages) {
      found.stages.push_back(stage_of(graph_, chosen));
    }
    return found;
  }

 private:
  bool is_proved() const { return best_.value - bound_ <= kExactPlan * best_.value; }

  /// Looks for a better plan among these cuts and those of the best plan. Returns whether there is one.
  bool improve(std::vector<NodeSet> sets, double precision) {
    for (const NodeSet& cut : cuts()) {
      sets.push_back(cut);
    }
    const CutFamily family = cut_family(graph_, std::move(sets));
    FamilyBest found = best_in_family(family, terms_, bound_, best_.value, precision);
    work_ += found.work + static_cast<std::int64_t>(family.sets.size() * family.sets.size());
    if (found.stages.empty()) {
      return false;
    }
    best_ = std::move(found);
    return true;
  }

  std::vector<NodeSet> cuts() const {
    std::vector<NodeSet> found;
    for (const ChosenStage& stage : best_.stages) {
      found.push_back(stage.after);
      for (const ChosenStage& inside : stage.inner) {
        found.push_back(inside.after);
      }
    }
    return found;
  }

  std::vector<NodeSet> thin(const std::vector<NodeSet>& sets) const {
    const std::size_t steps = limits_.family / 3;
    return thinned(graph_, sets, steps, 3);
  }

  void search_orders() {
    std::size_t next = 0;
    const auto in_order = [&](const NodeSet&) { return graph_.order()[next++]; };
    const auto cheapest = [&](const NodeSet& set) {
      int best = -1;
      double least = kUnbounded;
      NodeSet larger = set;
      for (const int node : graph_.addable(set)) {
        larger.add(node);
        const double crossing = graph_.crossing_bytes(larger);
        larger.remove(node);
        if (crossing < least) {
          least = crossing;
          best = node;
        }
      }
      return best;
    };
    std::vector<NodeSet> sets = set_prefixes(graph_, in_order);
    for (const std::vector<NodeSet>& more : {set_prefixes(graph_, cheapest), cheap_sets()}) {
      sets.insert(sets.end(), more.begin(), more.end());
    }
    improve(sets.size() <= limits_.family ? sets : thin(sets), kCoarsePlan);
  }

  /// Grows a closed set by a node and what that needs, the one with the least crossing behind it, and of equals the one
  /// that adds the least time. So it passes nodes whose outputs are large at once.
  std::vector<NodeSet> cheap_sets() {
    std::vector<NodeSet> found;
    NodeSet set(graph_.size());
    while (set.count() < graph_.size() && work_ < kOrderWork) {
      NodeSet best;
      std::pair<double, double> least(kUnbounded, kUnbounded);
      for (int node = 0; node < graph_.size(); ++node) {
        if (set.has(node)) {
          continue;
        }
        NodeSet larger = set;
        larger |= graph_.ancestors(node);
        const std::pair cost(graph_.crossing_bytes(larger), graph_.sums(larger).compute_ms);
        if (cost < least) {
          least = cost;
          best = std::move(larger);
        }
      }
      work_ += node_pairs();
      set = best;
      found.push_back(set);
    }
    return found;
  }

  /// Coarse to fine: a better plan narrows the relaxation, whose cells and minimum cuts hold the next family.
  void search_families(const std::optional<std::vector<NodeSet>>& sets) {
    CutRelaxation relaxation(graph_, terms_, sets);
    relaxation.divide(limits_.boxes / 10);
    std::size_t share = 1;  // of four: small families and cells first
    const auto spent = [&] { return work_ + relaxation.work(); };
    for (std::int64_t begun = spent(), last_round = 0; begun + last_round < kMostWork;) {
      const double known = bound_;
      const std::size_t cells = limits_.cells / 4 * share;
      const bool finer = narrow(relaxation, cells);
      improve(relaxation.candidates(limits_.family / 4 * share), kClosePlan);
      while (spent() < kMostWork && improve(neighbours(limits_.family / 4 * share), kClosePlan)) {
      }
      const bool few = relaxation.sets() && *relaxation.sets() <= limits_.all_sets;
      if (few || relaxation.cells() == 0) {
        improve(relaxation.candidates(limits_.all_sets), kExactPlan);
        bound_ = best_.value;
        return;
      }
      bound_ = relaxation.bound(bound_, limit(), kCloseBound);
      const double middle = (bound_ + limit()) / 2;
      const bool smaller = relaxation.refine(middle, limits_.boxes);
      const bool halved = relaxation.halve(middle, cells);
      const bool same = !halved && !finer && !smaller;
      if (is_proved() || (share == 4 && same)) {
        return;
      }
      share = std::min<std::size_t>(4, share + (same || bound_ > known ? 1 : 0));
      last_round = spent() - begun;
      begun = spent();
    }
  }

  /// Returns whether the cells are finer than before.
  bool narrow(CutRelaxation& relaxation, std::size_t cells) const {
    bool finer = false;
    relaxation.narrow(limit());
    while (relaxation.cells() <= cells / 2 && relaxation.halve(limit(), cells)) {
      relaxation.narrow(limit());
      finer = true;
    }
    return finer;
  }

  double limit() const { return std::min(best_.value, longest_plan(graph_, terms_)); }

  /// Closed sets near the cuts of the best plan: half of them differ in few nodes, the others have one more node and
  /// all that it needs, or lack a node and all that need it, and have the least crossing.
  std::vector<NodeSet> neighbours(std::size_t most) {
    std::vector<NodeSet> found;
    const std::vector<NodeSet> centres = cuts();
    for (const NodeSet& centre : centres) {
      add_nearest(centre, most / centres.size() / 2, found);
      add_cheapest(centre, most / centres.size() / 2, found);
    }
    return found;
  }

  void add_nearest(const NodeSet& centre, std::size_t most, std::vector<NodeSet>& found) const {
    std::vector<NodeSet> near = {centre};
    std::unordered_set<NodeSet, NodeSetHash> known(near.begin(), near.end());
    for (std::size_t next = 0; next < near.size() && near.size() < most; ++next) {
      const NodeSet set = near[next];
      const auto add = [&](NodeSet other) {
        if (known.insert(other).second) {
          near.push_back(std::move(other));
        }
      };
      for (const int node : graph_.addable(set)) {
        NodeSet larger = set;
        larger.add(node);
        add(std::move(larger));
      }
      for (const int node : graph_.removable(set)) {
        NodeSet smaller = set;
        smaller.remove(node);
        add(std::move(smaller));
      }
    }
    found.insert(found.end(), near.begin(), near.end());
  }

  void add_cheapest(const NodeSet& centre, std::size_t most, std::vector<NodeSet>& found) {
    std::vector<std::pair<double, int>> sorted;
    for (int node = 0; node < graph_.size(); ++node) {
      sorted.emplace_back(graph_.crossing_bytes(leap(centre, node)), node);
    }
    work_ += node_pairs();
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t i = 0; i < std::min(most, sorted.size()); ++i) {
      found.push_back(leap(centre, sorted[i].second));
    }
  }

  std::int64_t node_pairs() const { return std::int64_t{graph_.size()} * graph_.size(); }

  NodeSet leap(NodeSet set, int node) const {
    set.has(node) ? set -= graph_.descendants(node) : set |= graph_.ancestors(node);
    return set;
  }

  const ProfileGraph& graph_;
  const PipelineTerms& terms_;
  const PartitionLimits& limits_;
  FamilyBest best_;
  double bound_ = 0;
  std::int64_t work_ = 0;
};

}  // namespace

PipelinePartition partition_pipeline(const ProfileGraph& graph, const PipelineTerms& terms) {
  check_pipeline_terms(terms);
  HYDRA_EXPECT(longest_plan(graph, terms) <= kLongestPlan, PlanError,
               "a plan of this graph may take longer than " + std::to_string(kLongestPlan) +
                   " ms: give smaller times and sizes, or faster links");
  return PartitionSearch(graph, terms).run();
}

}  // namespace hydra
