#include "csrc/plan/cheapest_options.h"

#include <algorithm>

#include "csrc/plan/step_simulation.h"

namespace hydra {

CheapestOptions::CheapestOptions(const ActivationProblem& problem, const TreatmentSetting& setting)
    : problem_(problem), setting_(setting), segments_(problem.cuts[setting.cut]) {
  Bytes kept = 0;
  for (const ActivationSegment& segment : segments_) {
    kept += setting.round_size * kept_bytes(segment, ActivationOption::kKeep);
  }
  room_ = problem.machine.budget - setting.stash_bytes - setting.reserved;
  constexpr auto kUnits = static_cast<Bytes>(kCells);
  unit_ = std::max<Bytes>(1, (std::clamp<Bytes>(room_, 0, kept) + kUnits - 1) / kUnits);
}

std::optional<OptionChain> CheapestOptions::find(const LaneWeights& weights, const OptionSet& set) const {
  const std::size_t count = segments_.size();
  std::vector<std::vector<double>> costs(count + 1, std::vector<double>(kCells + 1, kNoSeconds));
  costs[0][0] = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (const ActivationOption option : kActivationOptions) {
      const std::optional<Move> move = move_of(segments_[i], option, weights, set);
      for (std::size_t k = 0; move && k < move->end; ++k) {
        double& cost = costs[i + 1][k + move->cells];
        cost = std::min(cost, costs[i][k] + move->cost);
      }
    }
  }
  const auto last = std::min_element(costs[count].begin(), costs[count].end());
  if (*last == kNoSeconds) {
    return std::nullopt;
  }
  return options_to(static_cast<std::size_t>(last - costs[count].begin()), costs, weights, set);
}

std::optional<CheapestOptions::Move> CheapestOptions::move_of(const ActivationSegment& segment, ActivationOption option,
                                                              const LaneWeights& weights, const OptionSet& set) const {
  const bool others = std::ranges::any_of(kActivationOptions, [&](ActivationOption other) {
    return other != ActivationOption::kKeep && set.has(other) && allows(segment, other, setting_.round_size);
  });
  const Bytes left = room_ - needed_bytes_if_allowed(segment, option);
  if (!allows(segment, option, setting_.round_size) || (!set.has(option) && others) || left < 0) {
    return std::nullopt;
  }
  const Bytes kept = setting_.round_size * kept_bytes(segment, option);
  const auto cells = static_cast<std::size_t>((kept + unit_ - 1) / unit_);
  if (cells > kCells) {
    return std::nullopt;
  }
  const auto end = std::min<std::size_t>(static_cast<std::size_t>(left / unit_) + 1, kCells + 1 - cells);
  const double moved = static_cast<double>(moved_bytes(segment, option));
  const double lanes = moved / problem_.machine.to_device + moved / problem_.machine.to_host;
  const double cost = weights.compute * compute_seconds(segment, option) + weights.lanes * lanes;
  return Move{cells, end, cost * problem_.microbatches};
}

Bytes CheapestOptions::needed_bytes_if_allowed(const ActivationSegment& segment, ActivationOption option) const {
  return allows(segment, option, setting_.round_size) ? needed_bytes(segment, option, setting_.round_size) : 0;
}

OptionChain CheapestOptions::options_to(std::size_t cell, const std::vector<std::vector<double>>& costs,
                                        const LaneWeights& weights, const OptionSet& set) const {
  OptionChain options(segments_.size());
  for (std::size_t i = segments_.size(); i-- > 0;) {
    for (const ActivationOption option : kActivationOptions) {
      const std::optional<Move> move = move_of(segments_[i], option, weights, set);
      if (move && cell >= move->cells && cell - move->cells < move->end &&
          costs[i][cell - move->cells] + move->cost == costs[i + 1][cell]) {
        options[i] = option;
        cell -= move->cells;
        break;
      }
    }
  }
  return options;
}

}  // namespace hydra
