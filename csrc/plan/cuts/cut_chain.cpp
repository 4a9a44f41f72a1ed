#include "csrc/plan/cuts/cut_chain.h"

#include <algorithm>
#include <array>
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

constexpr std::size_t kStarts = 16;  // cuts that chains are followed from at once

/// The best values of chains from a few cuts at once: for each cut after them, and for each count of machines. What a
/// stage takes is the same for chains from each of them, unless it is their first.
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
        limits_(cuts.size()),
        longest_(cuts.size()) {}

  void run(std::size_t first, StageTimes& times) {
    const std::size_t starts = std::min(kStarts, cuts_.size() - first);
    for (std::size_t end = first; end < cuts_.size(); ++end) {
      std::fill_n(row(end), machines_ + 1, kNone);
      limits_[end].fill(0);
      for (std::size_t i = 0; i < starts && first + i <= end; ++i) {
        limits_[end][i] = limit_of(first + i, end);
      }
      longest_[end] = *std::max_element(limits_[end].begin(), limits_[end].end());
    }
    for (std::size_t i = 0; i < starts; ++i) {
      order_.for_each_after(first + i, [&](std::size_t after) { begin(first + i, after, i); });
    }
    for (std::size_t before = first; before < cuts_.size(); ++before) {
      if (std::any_of(row(before), row(before) + machines_, [](const Values& each) { return each != kNone; })) {
        order_.for_each_after(before, [&](std::size_t after) { extend(before, after); });
      }
    }
    for (std::size_t i = 0; i < starts; ++i) {
      for (std::size_t end = first + i; end < cuts_.size(); ++end) {
        const double value = row(end)[machines_][i];
        times[(first + i) * cuts_.size() + end] = value <= limits_[end][i] ? value : kUnbounded;
      }
    }
  }

 private:
  using Values = std::array<double, kStarts>;  // of chains from each of the cuts

  /// What a stage needs, whatever its replicas.
  struct Stage {
    double compute = 0;
    double reduce = 0;
    double transfer = 0;
    double bytes = 0;
  };

  static constexpr Values kNone = [] {
    Values found{};
    found.fill(kUnbounded);
    return found;
  }();

  Values* row(std::size_t cut) noexcept { return values_.data() + cut * (machines_ + 1); }

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

  Stage stage(std::size_t before, std::size_t after) const noexcept {
    const Cut& from = cuts_[before];
    const Cut& to = cuts_[after];
    const double parameters = std::max(0.0, to.parameter_bytes.low - from.parameter_bytes.high);
    return {std::max(0.0, to.compute_ms.low - from.compute_ms.high), 4 * parameters / terms_.bytes_per_ms,
            terms_.transfers ? 2 * std::max(from.crossing_bytes, to.crossing_bytes) / terms_.bytes_per_ms : 0,
            parameters + std::max(0.0, to.activation_bytes.low - from.activation_bytes.high)};
  }

  /// Calls `visit(replicas, time, room)` for the counts with which a stage takes at most `limit`: the machines of later
  /// stages have to be within `room`.
  template <typename Visit>
  void for_each_count(const Stage& stage, double limit, const Visit& visit) const {
    const int most = terms_.straight ? 1 : terms_.machines;
    const bool capped = room_for_later(stage.bytes, terms_.memory_cap, 1) < terms_.machines;
    for (int replicas = 1; replicas <= most; ++replicas) {
      const double time = std::max(stage_ms(stage.compute, stage.reduce, replicas), stage.transfer / replicas);
      if (time <= limit) {
        const double room = capped ? room_for_later(stage.bytes, terms_.memory_cap, replicas) : kUnbounded;
        visit(static_cast<std::size_t>(replicas), time, std::min<double>(room, terms_.machines));
      }
    }
  }

  /// Adds the first stage of chains from the cut at `place`, which has no transfer before it.
  void begin(std::size_t start, std::size_t after, std::size_t place) {
    Stage first = stage(start, after);
    first.transfer = 0;
    for_each_count(first, limits_[after][place], [&](std::size_t replicas, double time, double room) {
      if (static_cast<double>(machines_ - replicas) <= room) {
        row(after)[replicas][place] = std::min(row(after)[replicas][place], time);
      }
    });
  }

  void extend(std::size_t before, std::size_t after) {
    const Values* mine = row(before);
    Values* reached = row(after);
    for_each_count(stage(before, after), longest_[after], [&](std::size_t replicas, double time, double room) {
      const std::size_t earliest = machines_ - static_cast<std::size_t>(room);  // count behind this stage
      for (std::size_t used = std::max<std::size_t>(1, earliest > replicas ? earliest - replicas : 0);
           used + replicas <= machines_; ++used) {
        for (std::size_t i = 0; i < kStarts; ++i) {
          reached[used + replicas][i] = std::min(reached[used + replicas][i], std::max(mine[used][i], time));
        }
      }
    });
  }

  const std::vector<Cut>& cuts_;
  const CutOrder& order_;
  const ChainTerms& terms_;
  const ChainTerms& outer_;
  double limit_;
  std::size_t machines_;
  std::vector<Values> values_;
  std::vector<Values> limits_;   // for each end
  std::vector<double> longest_;  // of these
};

}  // namespace

StageTimes best_times(const std::vector<Cut>& cuts, const CutOrder& order, const ChainTerms& inner,
                      const ChainTerms& outer, double limit) {
  StageTimes times(cuts.size() * cuts.size(), kUnbounded);
  TimesFrom search(cuts, order, inner, outer, limit);
  for (std::size_t first = 0; first < cuts.size(); first += kStarts) {
    search.run(first, times);
  }
  return times;
}

}  // namespace hydra
