#include "csrc/plan/cuts/cut_chain.h"

#include <algorithm>
#include <bitset>
#include <cmath>

#include "csrc/plan/chain.h"

namespace hydra {

namespace {

/// Milliseconds of a stage on `replicas`, of which `reduce` is 4 W / B.
double stage_ms(double compute, double reduce, int replicas) noexcept {
  return (compute + reduce * (replicas - 1) / replicas) / replicas;
}

/// The fewest machines so that `amount` is at most `limit` for each; `most` + 1 if `most` are too few.
int fewest(double amount, double limit, int most) noexcept {
  if (amount <= 0) {
    return 1;
  }
  const double exact = limit > 0 ? amount / limit * (1 - kSumRounding) : kUnbounded;
  return exact >= most + 1 ? most + 1 : std::max(1, static_cast<int>(std::ceil(exact)));
}

/// Replica counts with which a stage stays within a limit: from `low` to `high`, and from `again` on. The time falls
/// with the replicas but for the all-reduce term; r * limit - reduce * (1 - 1 / r) is convex in r.
struct ReplicaCounts {
  int low = 1;
  int high = 0;
  int again = 1;

  ReplicaCounts(double compute, double reduce, double limit, int most) noexcept : high(most), again(most + 1) {
    const double both = compute + reduce;
    const double square = both * both - 4 * limit * reduce;
    if (both <= 0 || square < 0) {
      return;
    }
    const double root = std::sqrt(square);
    high = static_cast<int>(std::min<double>(2 * reduce / (both + root), most));
    again = limit > 0 ? static_cast<int>(std::min<double>(std::ceil((both + root) / (2 * limit)), most + 1)) : most + 1;
    const auto within = [&](int replicas) { return stage_ms(compute, reduce, replicas) <= limit; };
    while (high < most && within(high + 1)) {
      ++high;
    }
    while (high > 0 && !within(high)) {
      --high;
    }
    again = std::max(again, high + 1);
    while (again > high + 1 && within(again - 1)) {
      --again;
    }
    while (again <= most && !within(again)) {
      ++again;
    }
  }
};

/// The most machines in later stages that a stage has room for.
double room_for_later(double bytes, double cap, int replicas) noexcept {
  return bytes > 0 ? std::floor(cap / bytes * (1 + kSumRounding)) * replicas : kUnbounded;
}

}  // namespace

CutChains::CutChains(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms,
                     const StageTimes& times)
    : cuts_(cuts), order_(order), terms_(terms), times_(times) {}

StageSums CutChains::sums(std::size_t before, std::size_t after) const noexcept {
  const Cut& from = cuts_[before];
  const Cut& to = cuts_[after];
  const double compute =
      times_.empty() ? std::max(0.0, to.compute_ms.low - from.compute_ms.high) : times_[before * cuts_.size() + after];
  return {compute, std::max(0.0, to.activation_bytes.low - from.activation_bytes.high),
          std::max(0.0, to.parameter_bytes.low - from.parameter_bytes.high)};
}

double CutChains::transfer_ms(std::size_t before, std::size_t after) const noexcept {
  if (!terms_.transfers || before == 0) {
    return 0;
  }
  return 2 * std::max(cuts_[before].crossing_bytes, cuts_[after].crossing_bytes) / terms_.bytes_per_ms;
}

double CutChains::reduce_ms(std::size_t before, double parameter_bytes) const noexcept {
  return 4 * parameter_bytes / terms_.bytes_per_ms / (before == 0 ? terms_.first_stage_share : 1);
}

double CutChains::value(const CutChain& chain) const noexcept {
  double slowest = 0;
  for (std::size_t i = 0; i < chain.replicas.size(); ++i) {
    const std::size_t before = chain.cuts[i];
    const std::size_t after = chain.cuts[i + 1];
    const StageSums stage = sums(before, after);
    const double reduce = reduce_ms(before, stage.parameter_bytes);
    slowest = std::max({slowest, stage_ms(stage.compute_ms, reduce, chain.replicas[i]),
                        transfer_ms(before, after) / chain.replicas[i]});
  }
  return slowest;
}

double CutChains::ceiling() const noexcept {
  double compute = cuts_.back().compute_ms.high;
  for (const double each : times_) {
    compute = each < kUnbounded ? std::max(compute, each) : compute;
  }
  double crossing = 0;
  for (const Cut& cut : cuts_) {
    crossing = std::max(crossing, cut.crossing_bytes);
  }
  return compute + (4 * cuts_.back().parameter_bytes.high + 2 * crossing) / terms_.bytes_per_ms;
}

double CutChains::floor() const noexcept {
  return cuts_.back().compute_ms.low / (terms_.machines * terms_.stage_machines) * (1 - kSumRounding);
}

/// For each cut, the machine counts that stages after it can use within a limit.
template <std::size_t Bits>
class CutChains::Search {
 public:
  Search(const CutChains& chains, double limit)
      : chains_(chains), terms_(chains.terms_), limit_(limit), later_(chains.cuts_.size()) {
    later_.back()[0] = true;
    for (std::size_t before = later_.size() - 1; before-- > 0;) {
      fill(before);
    }
  }

  std::optional<CutChain> chain() const {
    int left = terms_.machines;
    while (left > 0 && terms_.fewer && !later_[0][static_cast<std::size_t>(left)]) {
      --left;
    }
    if (!later_[0][static_cast<std::size_t>(left)]) {
      return std::nullopt;
    }
    CutChain found{{0}, {}};
    while (found.cuts.back() + 1 != later_.size()) {
      left -= step(found, left);
    }
    return found;
  }

  std::vector<bool> usable() const {
    std::vector<Counts> earlier(later_.size());
    earlier[0][0] = true;
    std::vector<bool> found(later_.size());
    for (std::size_t before = 0; before < later_.size(); ++before) {
      found[before] = meet(earlier[before], later_[before]);
      const int most_here = most(before);
      if (!found[before] || most_here < 1) {
        continue;
      }
      const auto add = [&](std::size_t after) {
        for_each_range(before, after, most_here, [&](int low, int high, double) {
          add_shifted(earlier[after], Counts(earlier[before]), low, high);
        });
      };
      add_loops(before, earlier[before], add);
      chains_.order_.for_each_after(before, add);
    }
    return found;
  }

 private:
  using Counts = std::bitset<Bits>;

  int most(std::size_t before) const {
    const double share = chains_.cuts_[before].compute_ms.low / terms_.stage_machines;
    return before == 0 ? terms_.machines : terms_.machines - fewest(share, limit_, terms_.machines);
  }

  /// Calls `visit(low, high)` for the ranges of replica counts that a stage may have.
  template <typename Visit>
  void for_each_range(std::size_t before, std::size_t after, int most, const Visit& visit) const {
    const StageSums stage = chains_.sums(before, after);
    if (stage.compute_ms * (1 - kSumRounding) > limit_ * most) {
      return;
    }
    const int low = fewest(chains_.transfer_ms(before, after), limit_, most);
    const double reduce = chains_.reduce_ms(before, stage.parameter_bytes);
    const ReplicaCounts counts(stage.compute_ms, reduce, limit_, most);
    const int top = terms_.straight ? 1 : most;
    const double bytes = stage.activation_bytes + stage.parameter_bytes;
    for (const auto& [first, last] : {std::pair(low, counts.high), std::pair(std::max(low, counts.again), most)}) {
      const int end = std::min(last, top);
      if (room_for_later(bytes, terms_.memory_cap, 1) >= terms_.machines) {
        visit(first, end, kUnbounded);
        continue;
      }
      for (int replicas = first; replicas <= end; ++replicas) {
        visit(replicas, replicas, room_for_later(bytes, terms_.memory_cap, replicas));
      }
    }
  }

  void fill(std::size_t before) {
    const int most_here = most(before);
    if (most_here < 1) {
      return;
    }
    Counts& mine = later_[before];
    const auto add = [&](std::size_t after) {
      if (later_[after].none()) {
        return;
      }
      for_each_range(before, after, most_here, [&](int low, int high, double room) {
        add_shifted(mine, room < terms_.machines ? later_[after] & up_to(static_cast<int>(room)) : later_[after], low,
                    high);
      });
    };
    chains_.order_.for_each_after(before, add);
    add_loops(before, mine, add);
    mine &= up_to(most_here);
  }

  /// Adds stages from a cut to itself, any number of them in a row.
  template <typename Add>
  void add_loops(std::size_t cut, const Counts& counts, const Add& add) const {
    for (bool more = chains_.order_.allows(cut, cut); more;) {
      const Counts known = counts;
      add(cut);
      more = counts != known;
    }
  }

  /// Whether stages before and after a cut use all machines together, or some of them if that is allowed.
  bool meet(const Counts& earlier, const Counts& later) const {
    for (int used = 0; used <= terms_.machines; ++used) {
      const int rest = terms_.machines - used;
      const bool fits = terms_.fewer ? (later & up_to(rest)).any() : later[static_cast<std::size_t>(rest)];
      if (fits && earlier[static_cast<std::size_t>(used)]) {
        return true;
      }
    }
    return false;
  }

  static Counts up_to(int most) { return ~Counts() >> (Bits - 1 - static_cast<std::size_t>(most)); }

  /// Adds `counts` shifted by each number from `low` to `high`.
  static void add_shifted(Counts& to, const Counts& counts, int low, int high) {
    if (low > high) {
      return;
    }
    Counts sum = counts << static_cast<std::size_t>(low);
    for (int width = high - low + 1, done = 1; done < width;) {
      const int more = std::min(done, width - done);
      sum |= sum << static_cast<std::size_t>(more);
      done += more;
    }
    to |= sum;
  }

  /// Adds a stage that leaves a count which later stages can use. Returns its replicas.
  int step(CutChain& found, int left) const {
    const std::size_t before = found.cuts.back();
    int chosen = 0;
    std::size_t next = 0;
    chains_.order_.for_each_after(before, [&](std::size_t after) {
      if (chosen > 0 || later_[after].none()) {
        return;
      }
      for_each_range(before, after, left, [&](int low, int high, double room) {
        for (int replicas = low; replicas <= std::min(high, left) && chosen == 0; ++replicas) {
          if (later_[after][static_cast<std::size_t>(left - replicas)] && left - replicas <= room) {
            chosen = replicas;
            next = after;
          }
        }
      });
    });
    HYDRA_EXPECT(chosen > 0, PlanError, "a stage was counted on that is not there: this is an error of hydra_ext");
    found.cuts.push_back(next);
    found.replicas.push_back(chosen);
    return chosen;
  }

  const CutChains& chains_;
  const ChainTerms& terms_;
  double limit_;
  std::vector<Counts> later_;
};

template <typename Visit>
auto CutChains::searched(double limit, const Visit& visit) const {
  if (terms_.machines < 64) {
    return visit(Search<64>(*this, limit));
  }
  if (terms_.machines < 128) {
    return visit(Search<128>(*this, limit));
  }
  return visit(Search<kMostMachines + 1>(*this, limit));
}

std::optional<CutChain> CutChains::within(double limit) const {
  return searched(limit, [](const auto& search) { return search.chain(); });
}

std::vector<bool> CutChains::usable(double limit) const {
  return searched(limit, [](const auto& search) { return search.usable(); });
}

BestChain best_chain(const CutChains& chains, double bound, double known, double precision) {
  BestChain found;
  found.bound = std::max(bound, chains.floor());
  const auto try_limit = [&](double limit) {
    ++found.searches;
    std::optional<CutChain> chain = chains.within(limit);
    if (!chain) {
      return false;
    }
    found.value = std::max(found.bound, std::min(limit, chains.value(*chain)));
    found.chain = std::move(chain);
    return true;
  };
  found.value = known;
  if (known == kUnbounded && !try_limit(chains.ceiling())) {
    found.bound = kUnbounded;
    return found;
  }
  if (known < kUnbounded && !try_limit(known * (1 - precision))) {
    found.bound = known;
    return found;
  }
  if (found.bound == 0 && found.value > 0) {
    try_limit(0);
  }
  while (found.value - found.bound > precision * found.value) {
    const bool far = found.bound > 0 && found.value > 2 * found.bound;
    const double middle = far ? std::sqrt(found.value * found.bound) : (found.value + found.bound) / 2;
    if (!try_limit(middle)) {
      found.bound = middle;
    }
  }
  found.bound = std::min(found.bound, found.value);
  return found;
}

namespace {

/// The best values of chains from one cut: for each cut after it, and for each count of machines.
class TimesFrom {
 public:
  TimesFrom(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& terms, const ChainTerms& outer,
            double limit)
      : cuts_(cuts),
        order_(order),
        terms_(terms),
        outer_(outer),
        limit_(limit),
        machines_(static_cast<std::size_t>(terms.machines)),
        values_(cuts.size() * (machines_ + 1)),
        limits_(cuts.size()) {}

  void run(std::size_t start, double* times) {
    for (std::size_t end = start; end < cuts_.size(); ++end) {
      limits_[end] = limit_of(start, end);
    }
    std::fill(values_.begin() + static_cast<std::ptrdiff_t>(start * (machines_ + 1)), values_.end(), kUnbounded);
    order_.for_each_after(start, [&](std::size_t after) { extend(start, after, true); });
    for (std::size_t before = start; before < cuts_.size(); ++before) {
      const double* mine = row(before);
      if (std::any_of(mine, mine + machines_, [](double value) { return value < kUnbounded; })) {
        order_.for_each_after(before, [&](std::size_t after) { extend(before, after, false); });
      }
    }
    for (std::size_t end = start; end < cuts_.size(); ++end) {
      times[end] = row(end)[machines_];
    }
  }

 private:
  double* row(std::size_t cut) noexcept { return values_.data() + cut * (machines_ + 1); }

  /// The most that an outer stage from `start` to `end`, or beyond, may take on one replica.
  double limit_of(std::size_t start, std::size_t end) const noexcept {
    if (limit_ == kUnbounded) {
      return kUnbounded;
    }
    const auto needed = [&](double compute) {
      return compute > 0 ? fewest(compute / outer_.stage_machines, limit_, outer_.machines) : 0;
    };
    const double compute = cuts_[end].compute_ms.low - cuts_[start].compute_ms.high;
    const int most = outer_.machines - needed(cuts_[start].compute_ms.low);
    if (most < 1) {
      return 0;
    }
    const double parameters = std::max(0.0, cuts_[end].parameter_bytes.low - cuts_[start].parameter_bytes.high);
    const double reduce = 4 * parameters / outer_.bytes_per_ms / (start == 0 ? outer_.first_stage_share : 1);
    const double widest = outer_.straight ? limit_ : most * limit_ - reduce * (most - 1) / most;  // convex between
    const double found = std::max(limit_, widest) * (1 + kSumRounding);
    return compute / outer_.stage_machines <= found ? found : 0;
  }

  void extend(std::size_t before, std::size_t after, bool first) {
    const Cut& from = cuts_[before];
    const Cut& to = cuts_[after];
    const double compute = std::max(0.0, to.compute_ms.low - from.compute_ms.high);
    const double parameters = std::max(0.0, to.parameter_bytes.low - from.parameter_bytes.high);
    const double bytes = parameters + std::max(0.0, to.activation_bytes.low - from.activation_bytes.high);
    const double reduce = 4 * parameters / terms_.bytes_per_ms;
    const double transfer =
        first || !terms_.transfers ? 0 : 2 * std::max(from.crossing_bytes, to.crossing_bytes) / terms_.bytes_per_ms;
    const std::size_t most = terms_.straight ? 1 : machines_;
    const bool capped = room_for_later(bytes, terms_.memory_cap, 1) < terms_.machines;
    for (std::size_t replicas = 1; replicas <= most; ++replicas) {
      const int count = static_cast<int>(replicas);
      const double time = std::max(stage_ms(compute, reduce, count), transfer / count);
      if (time > limits_[after]) {
        continue;
      }
      const double room = capped ? room_for_later(bytes, terms_.memory_cap, count) : kUnbounded;
      double* reached = row(after);
      if (first) {
        reached[replicas] = terms_.machines - count <= room ? std::min(reached[replicas], time) : reached[replicas];
        continue;
      }
      const double* mine = row(before);
      for (std::size_t used = 1; used + replicas <= machines_; ++used) {
        if (static_cast<double>(machines_ - used - replicas) <= room) {
          reached[used + replicas] = std::min(reached[used + replicas], std::max(mine[used], time));
        }
      }
    }
  }

  const std::vector<Cut>& cuts_;
  const CutOrder& order_;
  const ChainTerms& terms_;
  const ChainTerms& outer_;
  double limit_;
  std::size_t machines_;
  std::vector<double> values_;
  std::vector<double> limits_;  // for each end
};

}  // namespace

StageTimes best_times(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& inner,
                      const ChainTerms& outer, double limit) {
  StageTimes times(cuts.size() * cuts.size(), kUnbounded);
  TimesFrom search(cuts, order, inner, outer, limit);
  for (std::size_t start = 0; start < cuts.size(); ++start) {
    search.run(start, times.data() + start * cuts.size());
  }
  return times;
}

}  // namespace hydra
