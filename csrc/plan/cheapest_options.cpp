#include "csrc/plan/cheapest_options.h"

#include <algorithm>

#include "csrc/plan/step_simulation.h"

namespace hydra {

CheapestOptions::CheapestOptions(const ActivationProblem& problem, const TreatmentSetting& setting)
    : problem_(problem), setting_(setting), segments_(problem.cuts[setting.cut]) {
  most_kept_ = kept_until(segments_, OptionChain(segments_.size(), ActivationOption::kKeep));
  for (Bytes& kept : most_kept_) {
    kept *= setting.round_size;
  }
  room_ = problem.machine.budget - setting.stash_bytes - setting.reserved;
  constexpr auto kUnits = static_cast<Bytes>(kCells);
  unit_ = std::max<Bytes>(1, (std::clamp<Bytes>(room_, 0, most_kept_.back()) + kUnits - 1) / kUnits);
}

std::optional<OptionChain> CheapestOptions::find(const LaneWeights& weights, const OptionSet& set) const {
  const std::size_t count = segments_.size();
  std::vector<std::vector<double>> costs(count + 1, std::vector<double>(kCells + 1, kNoSeconds));
  costs[0][0] = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (const ActivationOption option : kActivationOptions) {
      const std::optional<Move> move = move_of(i, option, weights, set);
      for (std::size_t k = 0; move && k <= kCells && move->fits(k); ++k) {
        double& cost = costs[i + 1][move->to(k)];
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

std::optional<CheapestOptions::Move> CheapestOptions::move_of(std::size_t i, ActivationOption option,
                                                              const LaneWeights& weights, const OptionSet& set) const {
  const ActivationSegment& segment = segments_[i];
  const bool others = std::ranges::any_of(kActivationOptions, [&](ActivationOption other) {
    return other != ActivationOption::kKeep && set.has(other) && allows(segment, other, setting_.round_size);
  });
  if (!allows(segment, option, setting_.round_size) || (!set.has(option) && others)) {
    return std::nullopt;
  }
  const Bytes kept = setting_.round_size * kept_bytes(segment, option);
  const Bytes left = room_ - needed_bytes(segment, option, setting_.round_size);
  if (left + kept < 0) {
    return std::nullopt;
  }
  const bool shares = option == ActivationOption::kKeep;
  const Bytes fresh = shares ? setting_.round_size * segment.saved.fresh : kept;
  const double moved = static_cast<double>(moved_bytes(segment, option));
  const double lanes = moved / problem_.machine.to_device + moved / problem_.machine.to_host;
  const double cost = weights.compute * compute_seconds(segment, option) + weights.lanes * lanes;
  return Move{.cells = cells_of(kept),
              .fresh = cells_of(fresh),
              .most = shares ? cells_of(most_kept_[i]) : 0,
              .end = left < 0 ? 0 : static_cast<std::size_t>(left / unit_) + 1,
              .limit = static_cast<std::size_t>((left + kept) / unit_),
              .cost = cost * problem_.microbatches};
}

std::size_t CheapestOptions::cells_of(Bytes bytes) const {
  return static_cast<std::size_t>((bytes + unit_ - 1) / unit_);
}

OptionChain CheapestOptions::options_to(std::size_t cell, const std::vector<std::vector<double>>& costs,
                                        const LaneWeights& weights, const OptionSet& set) const {
  OptionChain options(segments_.size());
  for (std::size_t i = segments_.size(); i-- > 0;) {
    std::optional<std::size_t> before;
    for (const ActivationOption option : kActivationOptions) {
      const std::optional<Move> move = move_of(i, option, weights, set);
      for (std::size_t k = 0; move && !before && k <= cell && move->fits(k); ++k) {
        if (move->to(k) == cell && costs[i][k] + move->cost == costs[i + 1][cell]) {
          options[i] = option;
          before = k;
        }
      }
    }
    cell = before.value_or(0);
  }
  return options;
}

}  // namespace hydra
