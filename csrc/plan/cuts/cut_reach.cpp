#include "csrc/plan/cuts/cut_reach.h"

#include <algorithm>
#include <cmath>

namespace hydra {

namespace {

constexpr double kRounding = 1e-12;  // relative to all compute time

int rounded_up(double amount, int most) noexcept {
  return amount >= most + 1 ? most + 1 : static_cast<int>(std::ceil(amount));
}

}  // namespace

CutReach::CutReach(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, double limit)
    : cuts_(cuts),
      order_(order),
      terms_(terms),
      limit_(limit),
      machines_(static_cast<std::size_t>(terms.machines)),
      most_(cuts.size() * (machines_ + 1), -kNever) {
  most(0)[0] = 0;
  for (std::size_t before = 0; before + 1 < cuts_.size(); ++before) {
    order_.for_each_after(before, [&](std::size_t after) { extend(before, after); });
  }
}

CutReach::Stage CutReach::stage(std::size_t before, std::size_t after) const noexcept {
  const Cut& from = cuts_[before];
  const Cut& to = cuts_[after];
  Stage found;
  const double parameters = std::max(0.0, to.parameter_bytes.low - from.parameter_bytes.high);
  found.reduce = 4 * parameters / terms_.bytes_per_ms;
  found.bytes = parameters + std::max(0.0, to.activation_bytes.low - from.activation_bytes.high);
  if (terms_.transfers && before > 0) {
    const double transfer = 2 * std::max(from.crossing_bytes, to.crossing_bytes) / terms_.bytes_per_ms;
    found.fewest = std::max(1, rounded_up(transfer / limit_ * (1 - kRounding), terms_.machines));
  }
  return found;
}

bool CutReach::fits(const Stage& stage, int replicas, int later) const noexcept {
  return terms_.fewer || terms_.memory_cap == kNever ||
         std::ceil(static_cast<double>(later) / replicas) * stage.bytes <= terms_.memory_cap * (1 + kRounding);
}

void CutReach::extend(std::size_t before, std::size_t after) {
  const Cut& to = cuts_[after];
  const Stage needs = stage(before, after);
  const double slack = kRounding * cuts_.back().compute_ms.high;
  const bool last = after + 1 == cuts_.size();
  const double rest = (cuts_.back().compute_ms.low - to.compute_ms.high - slack) / limit_;
  const int room = terms_.machines - (last ? 0 : std::max(1, rounded_up(rest, terms_.machines)));
  const double* mine = most(before);
  double* reached = most(after);
  for (int used = before == 0 ? 0 : 1; used < room; ++used) {
    if (mine[used] == -kNever) {
      continue;
    }
    const int nearest = rounded_up((to.compute_ms.low - mine[used] - slack) / limit_, terms_.machines);
    const int highest = terms_.straight ? 1 : room - used;
    for (int replicas = std::max(needs.fewest, nearest); replicas <= highest; ++replicas) {
      const double gain = replicas * limit_ - needs.reduce * (replicas - 1) / replicas;
      const double compute = std::min(to.compute_ms.high, mine[used] + gain + slack);
      const int total = used + replicas;
      if (compute >= to.compute_ms.low && fits(needs, replicas, terms_.machines - total)) {
        reached[total] = std::max(reached[total], compute);
      }
    }
  }
}

bool CutReach::reaches_end() const noexcept {
  const double* end = most(cuts_.size() - 1);
  return std::any_of(end + (terms_.fewer ? 1 : machines_), end + machines_ + 1,
                     [](double compute) { return compute > -kNever; });
}

std::vector<Interval> CutReach::usable() const {
  const std::size_t width = machines_ + 1;
  const double slack = kRounding * cuts_.back().compute_ms.high;
  std::vector<double> least(cuts_.size() * width, kNever);  // for each count of machines behind a cut
  std::vector<Interval> found(cuts_.size(), {kNever, -kNever});
  least[(cuts_.size() - 1) * width] = cuts_.back().compute_ms.low;
  for (std::size_t before = cuts_.size(); before-- > 0;) {
    const Cut& from = cuts_[before];
    double* mine = least.data() + before * width;
    const auto extend_back = [&](std::size_t after) {
      const Stage needs = stage(before, after);
      const double* rest = least.data() + after * width;
      for (std::size_t later = 0; later < machines_; ++later) {
        if (rest[later] == kNever) {
          continue;
        }
        const int highest = terms_.straight ? 1 : static_cast<int>(machines_ - later);
        for (int replicas = needs.fewest; replicas <= highest; ++replicas) {
          const double gain = replicas * limit_ - needs.reduce * (replicas - 1) / replicas;
          const double compute = std::max(from.compute_ms.low, rest[later] - gain - slack);
          const std::size_t total = later + static_cast<std::size_t>(replicas);
          if (compute <= from.compute_ms.high && fits(needs, replicas, static_cast<int>(later))) {
            mine[total] = std::min(mine[total], compute);
          }
        }
      }
    };
    const double* reached = most(before);
    if (std::all_of(reached, reached + width, [](double compute) { return compute == -kNever; })) {
      continue;
    }
    order_.for_each_after(before, [&](std::size_t after) {
      if (after != before) {
        extend_back(after);
      }
    });
    if (order_.allows(before, before)) {
      extend_back(before);
    }
    for (std::size_t used = 0; used < width; ++used) {
      for (std::size_t later = terms_.fewer ? 0 : machines_ - used; later + used <= machines_; ++later) {
        if (mine[later] <= reached[used]) {
          found[before].low = std::min(found[before].low, mine[later]);
          found[before].high = std::max(found[before].high, reached[used]);
        }
      }
    }
  }
  return found;
}

double reach_bound(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, double bound,
                   double known, double precision) {
  const double whole = cuts.back().compute_ms.low / terms.machines * (1 - kRounding);
  double low = std::max(bound, whole);
  double high = known;
  while (high - low > precision * high) {
    const double middle = low > 0 && high > 2 * low ? std::sqrt(low * high) : (low + high) / 2;
    (CutReach(cuts, order, terms, middle).reaches_end() ? high : low) = middle;
  }
  return std::min(low, known);
}

}  // namespace hydra
