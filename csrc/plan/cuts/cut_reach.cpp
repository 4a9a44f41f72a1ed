#include "csrc/plan/cuts/cut_reach.h"

#include <algorithm>
#include <cmath>

namespace hydra {

namespace {

constexpr double kSameBound = 1e-11;     // relative: values that are closer are one
constexpr double kPairRounding = 1e-11;  // relative: more than the rounding of a stage's machines

}  // namespace

CutReach::CutReach(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, double limit)
    : cuts_(cuts),
      order_(order),
      terms_(terms),
      limit_(limit),
      slack_(kSumRounding * cuts.back().compute_ms.high),
      width_(static_cast<std::size_t>(terms.machines) + 1),
      least_(cuts.size() * width_, kUnbounded),
      lowest_(cuts.size(), kUnbounded),
      fewest_(cuts.size(), terms.machines + 1) {
  least_[(cuts_.size() - 1) * width_] = cuts_.back().compute_ms.low;
  summarize(cuts_.size() - 1);
  for (std::size_t before = cuts_.size() - 1; before-- > 0;) {
    const int earlier = before == 0 ? 0 : std::max(1, machines_for(cuts_[before].compute_ms.low - slack_));
    const int room = terms_.machines - earlier;
    order_.for_each_after(before, [&](std::size_t after) {
      if (after != before) {
        extend_back(before, after, room);
      }
    });
    summarize(before);
    if (order_.allows(before, before)) {
      extend_back(before, before, room);  // with what the others have left
      summarize(before);
    }
  }
}

void CutReach::summarize(std::size_t cut) noexcept {
  const double* mine = least_.data() + cut * width_;
  const auto first = std::find_if(mine, mine + width_, [](double compute) { return compute < kUnbounded; });
  fewest_[cut] = static_cast<int>(first - mine);
  lowest_[cut] = *std::min_element(mine, mine + width_);
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
    found.fewest = std::max(1, machines_for(transfer * (1 - kSumRounding)));
  }
  return found;
}

double CutReach::gain(const Stage& stage, int replicas) const noexcept {
  return replicas * limit_ - stage.reduce * (replicas - 1) / replicas + slack_;
}

bool CutReach::fits(const Stage& stage, int replicas, int later) const noexcept {
  return std::ceil(static_cast<double>(later) / replicas) * stage.bytes <= terms_.memory_cap * (1 + kSumRounding);
}

int CutReach::machines_for(double compute) const noexcept {
  if (compute <= 0) {
    return 0;
  }
  const double exact = compute / limit_;
  return exact >= terms_.machines + 1 ? terms_.machines + 1 : static_cast<int>(std::ceil(exact));
}

void CutReach::extend_back(std::size_t before, std::size_t after, int room) {
  const Cut& from = cuts_[before];
  work_ += kPairSteps + std::max(0, room);
  const double* rest = least_.data() + after * width_;
  // Most pairs end here, before the divisions: a stage of all machines that are left would not do.
  const int first = fewest_[after];
  const double most = (room - first) * limit_ * (1 + kPairRounding);
  const double crossing =
      terms_.transfers && before > 0 ? std::max(from.crossing_bytes, cuts_[after].crossing_bytes) : 0;
  if (first >= room || lowest_[after] - from.compute_ms.high - 2 * slack_ > most ||
      2 * crossing > most * terms_.bytes_per_ms) {
    return;
  }
  const Stage needs = stage(before, after);
  double* mine = least_.data() + before * width_;
  for (int later = first; later < room; ++later) {
    if (rest[later] == kUnbounded) {
      continue;
    }
    const int nearest = machines_for(rest[later] - from.compute_ms.high - slack_);
    const int highest = terms_.straight ? 1 : room - later;
    work_ += std::max(0, highest - nearest);
    for (int replicas = std::max(needs.fewest, nearest); replicas <= highest; ++replicas) {
      const double compute = std::max(from.compute_ms.low, rest[later] - gain(needs, replicas));
      if (compute <= from.compute_ms.high && fits(needs, replicas, later)) {
        mine[later + replicas] = std::min(mine[later + replicas], compute);
      }
    }
  }
}

bool CutReach::is_possible() const noexcept {
  const auto possible = [](double compute) { return compute < kUnbounded; };
  return terms_.fewer ? std::any_of(least_.begin() + 1, least_.begin() + static_cast<std::ptrdiff_t>(width_), possible)
                      : possible(least_[width_ - 1]);
}

void CutReach::extend(std::size_t before, std::size_t after, std::vector<double>& most) {
  const Cut& to = cuts_[after];
  const Stage needs = stage(before, after);
  const bool last = after + 1 == cuts_.size();
  const double rest = cuts_.back().compute_ms.low - to.compute_ms.high - slack_;
  const int room = terms_.machines - (last ? 0 : std::max(1, machines_for(rest)));
  work_ += kPairSteps + std::max(0, room);
  const double* mine = most.data() + before * width_;
  double* reached = most.data() + after * width_;
  for (int used = 0; used < room; ++used) {
    if (mine[used] == -kUnbounded) {
      continue;
    }
    const int nearest = machines_for(to.compute_ms.low - mine[used] - slack_);
    const int highest = terms_.straight ? 1 : room - used;
    work_ += std::max(0, highest - nearest);
    for (int replicas = std::max(needs.fewest, nearest); replicas <= highest; ++replicas) {
      const double compute = std::min(to.compute_ms.high, mine[used] + gain(needs, replicas));
      const int total = used + replicas;
      const int later = terms_.machines - (terms_.fewer ? room : total);  // at least
      if (compute >= to.compute_ms.low && fits(needs, replicas, later)) {
        reached[total] = std::max(reached[total], compute);
      }
    }
  }
}

std::vector<Interval> CutReach::usable() {
  std::vector<double> most(cuts_.size() * width_, -kUnbounded);  // for each count of machines before a cut
  most[0] = 0;
  std::vector<Interval> found(cuts_.size(), {kUnbounded, -kUnbounded});
  for (std::size_t cut = 0; cut < cuts_.size(); ++cut) {
    if (order_.allows(cut, cut)) {
      extend(cut, cut, most);
    }
    const double* reached = most.data() + cut * width_;
    const double* least = least_.data() + cut * width_;
    for (std::size_t used = 0; used < width_; ++used) {
      const std::size_t rest = width_ - 1 - used;
      for (std::size_t later = terms_.fewer ? 0 : rest; later <= rest; ++later) {
        if (least[later] <= reached[used]) {
          found[cut].low = std::min(found[cut].low, least[later]);
          found[cut].high = std::max(found[cut].high, reached[used]);
        }
      }
    }
    if (found[cut].low <= found[cut].high) {
      order_.for_each_after(cut, [&](std::size_t after) {
        if (after != cut) {
          extend(cut, after, most);
        }
      });
    }
  }
  return found;
}

double reach_bound(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, double bound,
                   double known, double precision, std::int64_t& work) {
  const auto is_possible = [&](double limit) {
    const CutReach reach(cuts, order, terms, limit);
    work += reach.work();
    return reach.is_possible();
  };
  if (!is_possible(known * (1 - kSameBound))) {
    return known;
  }
  double low = std::max(bound, cuts.back().compute_ms.low / terms.machines * (1 - kSumRounding));
  double high = known;
  while (high - low > precision * high) {
    const double middle = low > 0 && high > 2 * low ? std::sqrt(low * high) : (low + high) / 2;
    (is_possible(middle) ? high : low) = middle;
  }
  return std::min(low, known);
}

}  // namespace hydra
