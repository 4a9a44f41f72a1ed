#include "csrc/plan/cuts/cut_family.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace hydra {

namespace {

constexpr double kInnerPrecision = 1e-12;  // relative: the inner plan has the value that the outer one counts on

Cut exact_cut(const ProfileGraph& graph, const NodeSet& set) {
  const ProfileSums sums = graph.sums(set);
  return {{sums.compute_ms, sums.compute_ms},
          {sums.activation_bytes, sums.activation_bytes},
          {sums.parameter_bytes, sums.parameter_bytes},
          graph.crossing_bytes(set)};
}

/// The cuts from one to another, as a family of their own, whose compute time begins with 0. The bytes of its stages
/// are the same differences as those of the whole family's, so that a memory cap has the same answers.
CutFamily family_part(const CutFamily& family, std::size_t begin, std::size_t end) {
  CutFamily found;
  for (std::size_t i = begin; i <= end; ++i) {
    const bool inside = (i == begin || family.order.allows(begin, i)) && (i == end || family.order.allows(i, end));
    if (inside) {
      found.sets.push_back(family.sets[i]);
      Cut cut = family.cuts[i];
      const Interval start = family.cuts[begin].compute_ms;
      cut.compute_ms = {cut.compute_ms.low - start.low, cut.compute_ms.high - start.high};
      found.cuts.push_back(cut);
    }
  }
  return found;
}

void relate_sets(CutFamily& family) {
  family.order = CutOrder(family.sets.size());
  for (std::size_t before = 0; before < family.sets.size(); ++before) {
    for (std::size_t after = before + 1; after < family.sets.size(); ++after) {
      if (family.sets[before].is_within(family.sets[after])) {
        family.order.allow(before, after);
        ++family.pairs;
      }
    }
  }
}

/// Steps of searches that visit every pair.
std::int64_t family_work(const CutFamily& family, int searches, int machines) {
  return static_cast<std::int64_t>(family.pairs) * (kPairSteps + machines / 2) * searches;
}

std::vector<ChosenStage> chosen_stages(const CutFamily& family, const CutChain& chain) {
  std::vector<ChosenStage> found;
  for (std::size_t i = 0; i < chain.replicas.size(); ++i) {
    found.push_back({chain.replicas[i], family.sets[chain.cuts[i]], family.sets[chain.cuts[i + 1]], {}});
  }
  return found;
}

}  // namespace

ChainTerms chain_terms(const PipelineTerms& terms, std::size_t level) {
  ChainTerms found;
  found.machines = terms.levels[level].machines;
  found.bytes_per_ms = terms.levels[level].bytes_per_second / 1000;
  found.memory_cap = terms.memory_cap.value_or(kUnbounded);
  found.straight = terms.straight;
  found.fewer = terms.fewer && level + 1 == terms.levels.size();
  found.transfers = terms.transfers;
  if (level > 0) {
    found.first_stage_share = terms.levels[0].machines;
    found.stage_machines = terms.levels[0].machines;
  }
  return found;
}

CutFamily cut_family(const ProfileGraph& graph, std::vector<NodeSet> sets) {
  NodeSet whole(graph.size());
  for (int node = 0; node < graph.size(); ++node) {
    whole.add(node);
  }
  sets.emplace_back(graph.size());
  sets.push_back(whole);
  std::vector<std::pair<int, NodeSet>> sorted;
  for (NodeSet& set : sets) {
    const int count = set.count();
    sorted.emplace_back(count, std::move(set));
  }
  std::sort(sorted.begin(), sorted.end(), [](const auto& left, const auto& right) {
    return std::tie(left.first, left.second.words()) < std::tie(right.first, right.second.words());
  });
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  CutFamily family;
  for (auto& [count, set] : sorted) {
    family.cuts.push_back(exact_cut(graph, set));
    family.sets.push_back(std::move(set));
  }
  relate_sets(family);
  return family;
}

std::vector<NodeSet> thinned(const ProfileGraph& graph, std::vector<NodeSet> sets, std::size_t steps,
                             std::size_t most) {
  double total = 0;
  for (int node = 0; node < graph.size(); ++node) {
    total += graph.node(node).compute_ms;
  }
  std::vector<std::tuple<std::size_t, double, std::size_t>> sorted;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    const double place = total > 0 ? graph.sums(sets[i]).compute_ms / total * static_cast<double>(steps) : 0;
    sorted.emplace_back(static_cast<std::size_t>(place), graph.crossing_bytes(sets[i]), i);
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<NodeSet> found;
  std::size_t taken = 0;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    taken = i > 0 && std::get<0>(sorted[i]) == std::get<0>(sorted[i - 1]) ? taken : 0;
    const NodeSet& set = sets[std::get<2>(sorted[i])];
    if (taken < most && std::find(found.end() - static_cast<std::ptrdiff_t>(taken), found.end(), set) == found.end()) {
      found.push_back(set);
      ++taken;
    }
  }
  return found;
}

FamilyBest best_in_family(const CutFamily& family, const PipelineTerms& terms, double bound, double known,
                          double precision) {
  const ChainTerms inner = chain_terms(terms, 0);
  if (terms.levels.size() == 1) {
    const BestChain best = best_chain(CutChains(family.cuts, family.order, inner), bound, known, precision);
    return {best.chain ? chosen_stages(family, *best.chain) : std::vector<ChosenStage>(), best.value, best.bound,
            family_work(family, best.searches, inner.machines)};
  }
  const ChainTerms outer = chain_terms(terms, 1);
  const StageTimes times = best_times(family.cuts, family.order, inner, outer, known);
  const BestChain best = best_chain(CutChains(family.cuts, family.order, outer, times), bound, known, precision);
  const auto starts = static_cast<int>(family.sets.size()) * inner.machines;
  FamilyBest found{{}, best.value, best.bound, family_work(family, best.searches + starts, outer.machines)};
  if (best.chain) {
    found.stages = chosen_stages(family, *best.chain);
    for (std::size_t i = 0; i < found.stages.size(); ++i) {
      CutFamily stage = family_part(family, best.chain->cuts[i], best.chain->cuts[i + 1]);
      relate_sets(stage);
      const BestChain inside = best_chain(CutChains(stage.cuts, stage.order, inner), 0, kUnbounded, kInnerPrecision);
      HYDRA_EXPECT(inside.chain.has_value(), PlanError,
                   "an inner pipeline was counted on that is not there: this is an error of hydra_ext");
      found.stages[i].inner = chosen_stages(stage, *inside.chain);
    }
  }
  return found;
}

}  // namespace hydra
