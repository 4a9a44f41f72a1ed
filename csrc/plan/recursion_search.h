// Exact search of a recursion whose values depend on the memory that is left.
//
//   state    a subproblem, by number; a choice's states have smaller numbers than its own state
//   choice   one way to solve a state: it costs time, needs memory, and leaves up to two states to solve
//
//   value(state, memory) = min of choice.cost + value(choice.first, memory - choice.held) + value(choice.second,
//   memory)
//                          over the state's choices with choice.needed <= memory
//
// Memory is in whole bytes and never rounded in what is returned. Two tables over a grid of `cells` amounts of memory
// give bounds: sizes rounded down give a lower one, sizes rounded up give an upper one, which some solution reaches. If
// the grid has every amount, the bounds meet. Else a depth-first search closes them where the solution depends on them.
// It remembers what it has proved: a lower bound holds for less memory too, an upper one for more.
//
// The search counts the choices that it looks at, and ends early after `work` of them. The result depends on its
// arguments only, not on a clock. A Graph has `int states() const`, `int choices(int state) const`, and
// `RecursionChoice choice(int state, int index) const`.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <vector>

#include "csrc/base/types.h"

namespace hydra {

struct RecursionChoice {
  double cost = 0;
  Bytes needed = 0;
  int first = -1;  // -1: none
  Bytes held = 0;  // while `first` is solved
  int second = -1;
};

struct SearchEffort {
  int cells = 2048;               // of the grid
  std::int64_t work = 1'000'000;  // choices that the search may look at
};

/// Refers to the graph, which has to outlive it. Not for several threads at once.
template <typename Graph>
class RecursionSearch {
 public:
  RecursionSearch(const Graph& graph, Bytes memory, SearchEffort effort)
      : graph_(graph), memory_(memory), work_(effort.work), found_(count()), proved_(count()) {
    least_.resize(count(), kNever);
    fastest_.resize(count(), {kInfinite, kNever});
    for (int state = 0; state < graph_.states(); ++state) {
      find_least(state);
      find_fastest(state);
    }
    if (possible()) {
      unit_ = std::max<Bytes>(1, (memory + effort.cells - 1) / std::max(1, effort.cells));
      width_ = static_cast<std::size_t>(memory / unit_) + 2;  // amounts 0, 1, ... units, up to the first above memory
      fill_tables();
      close(graph_.states() - 1, memory);
    }
  }

  /// Whether the last state can be solved at all.
  bool possible() const { return graph_.states() > 0 && least_.back() <= memory_; }
  double value() const { return upper(graph_.states() - 1, memory_); }
  /// No solution has a lower value.
  double bound() const { return std::min(value(), lower(graph_.states() - 1, memory_)); }

  /// The number of the choice that begins a solution of the state, one with the value upper(state, memory).
  int best(int state, Bytes memory) const {
    int best = 0;
    double least = kInfinite;
    for (int index = 0; index < graph_.choices(state); ++index) {
      const RecursionChoice choice = graph_.choice(state, index);
      const double value = choice.needed <= memory ? value_of(choice, memory) : kInfinite;
      if (value < least) {
        least = value;
        best = index;
      }
    }
    return best;
  }

 private:
  static constexpr double kInfinite = std::numeric_limits<double>::infinity();
  static constexpr Bytes kNever = std::numeric_limits<Bytes>::max() / 4;
  static constexpr double kSame = 1e-13;  // relative: sums in another order
  using Steps = std::map<Bytes, double>;  // falls as memory rises

  struct Fastest {
    double value;
    Bytes needed;
    auto operator<=>(const Fastest&) const = default;
  };

  std::size_t count() const { return static_cast<std::size_t>(graph_.states()); }
  static std::size_t at(int state) { return static_cast<std::size_t>(state); }

  /// The least memory with which the state can be solved, and the value of one such solution.
  void find_least(int state) {
    double value = kInfinite;
    Bytes& least = least_[at(state)];
    for (int index = 0; index < graph_.choices(state); ++index) {
      const RecursionChoice choice = graph_.choice(state, index);
      Bytes needed = choice.needed;
      needed = choice.first < 0 ? needed : std::max(needed, choice.held + least_[at(choice.first)]);
      needed = choice.second < 0 ? needed : std::max(needed, least_[at(choice.second)]);
      if (needed > memory_ || needed > least) {
        continue;
      }
      double sum = choice.cost;
      sum += choice.first < 0 ? 0 : found_[at(choice.first)].begin()->second;
      sum += choice.second < 0 ? 0 : found_[at(choice.second)].begin()->second;
      if (needed < least || sum < value) {
        least = needed;
        value = sum;
      }
    }
    if (least <= memory_) {
      found_[at(state)][least] = value;
    }
  }

  /// The least value with any memory, and the least memory for one such solution.
  void find_fastest(int state) {
    Fastest& fastest = fastest_[at(state)];
    for (int index = 0; index < graph_.choices(state); ++index) {
      const RecursionChoice choice = graph_.choice(state, index);
      Fastest other = {choice.cost, choice.needed};
      if (choice.first >= 0) {
        other.value += fastest_[at(choice.first)].value;
        other.needed = std::max(other.needed, choice.held + fastest_[at(choice.first)].needed);
      }
      if (choice.second >= 0) {
        other.value += fastest_[at(choice.second)].value;
        other.needed = std::max(other.needed, fastest_[at(choice.second)].needed);
      }
      fastest = std::min(fastest, other);
    }
    if (fastest.needed <= memory_) {
      note_found(state, fastest.needed, fastest.value);
    }
  }

  void fill_tables() {
    low_.assign(count() * width_, kInfinite);
    high_.assign(count() * width_, kInfinite);
    for (int state = 0; state < graph_.states(); ++state) {
      for (int index = 0; index < graph_.choices(state); ++index) {
        const RecursionChoice choice = graph_.choice(state, index);
        if (choice.needed <= memory_) {
          add(low_, state, choice, choice.held / unit_);
          add(high_, state, choice, (choice.held + unit_ - 1) / unit_);
        }
      }
    }
  }

  /// An amount of k units has the choice if it needs at most that.
  void add(std::vector<double>& table, int state, const RecursionChoice& choice, Bytes held) {
    const std::size_t shift =
        choice.first < 0 ? 0 : static_cast<std::size_t>(std::min<Bytes>(held, memory_ / unit_ + 2));
    const std::size_t begin = std::max(static_cast<std::size_t>((choice.needed + unit_ - 1) / unit_), shift);
    double* into = &table[at(state) * width_];
    const double* first = choice.first < 0 ? nullptr : &table[at(choice.first) * width_];
    const double* second = choice.second < 0 ? nullptr : &table[at(choice.second) * width_];
    if (first != nullptr && second != nullptr) {
      for (std::size_t k = begin; k < width_; ++k) {
        into[k] = std::min(into[k], choice.cost + first[k - shift] + second[k]);
      }
    } else {
      const double* only = first != nullptr ? first : second;
      for (std::size_t k = begin; k < width_; ++k) {
        into[k] = std::min(into[k], choice.cost + (only != nullptr ? only[k - shift] : 0.0));
      }
    }
  }

  double lower(int state, Bytes memory) const {
    if (memory < least_[at(state)]) {
      return kInfinite;
    }
    const auto k = static_cast<std::size_t>((memory + unit_ - 1) / unit_);
    const double table = low_[at(state) * width_ + k];
    const auto proved = proved_[at(state)].lower_bound(memory);
    return proved == proved_[at(state)].end() ? table : std::max(table, proved->second);
  }

  double upper(int state, Bytes memory) const {
    if (memory < least_[at(state)]) {
      return kInfinite;
    }
    const double table = high_[at(state) * width_ + static_cast<std::size_t>(memory / unit_)];
    return std::min(table, std::prev(found_[at(state)].upper_bound(memory))->second);
  }

  double value_of(const RecursionChoice& choice, Bytes memory) const {
    double sum = choice.cost;
    sum += choice.first < 0 ? 0 : upper(choice.first, memory - choice.held);
    return sum + (choice.second < 0 ? 0 : upper(choice.second, memory));
  }

  void note_found(int state, Bytes memory, double value) {
    Steps& steps = found_[at(state)];
    auto next = steps.insert_or_assign(memory, value).first;
    for (++next; next != steps.end() && next->second >= value;) {
      next = steps.erase(next);
    }
  }

  void note_proved(int state, Bytes memory, double value) {
    Steps& steps = proved_[at(state)];
    auto here = steps.insert_or_assign(memory, value).first;
    while (here != steps.begin() && std::prev(here)->second <= value) {
      steps.erase(std::prev(here));
    }
  }

  /// Lets the bounds of the last state meet, in growing pieces of their distance: a piece below the optimum is proved
  /// fast, and what is proved helps the next.
  void close(int state, Bytes memory) {
    for (const double part : {1.0 / 16, 1.0 / 8, 1.0 / 4, 1.0 / 2, 1.0}) {
      const double low = lower(state, memory);
      const double high = upper(state, memory);
      if (low >= high || work_ <= 0) {
        return;
      }
      solve(state, memory, part < 1 ? low + part * (high - low) : kInfinite);
    }
  }

  struct Candidate {
    double bound;
    int index;
    auto operator<=>(const Candidate&) const = default;
  };

  /// Returns the state's value, or a bound of at least `cutoff` that it does not go below. Without work, a value that
  /// it may go below.
  double solve(int state, Bytes memory, double cutoff) {
    const double low = lower(state, memory);
    const double high = upper(state, memory);
    if (low >= high || low >= cutoff) {
      return std::min(low, high);
    }
    double best = std::min(high, cutoff);
    std::vector<Candidate> candidates;
    for (int index = 0; index < graph_.choices(state); ++index) {
      const RecursionChoice choice = graph_.choice(state, index);
      const double bound = choice.needed <= memory ? bound_of(choice, memory) : kInfinite;
      if (bound < best) {
        candidates.push_back({bound, index});
      }
    }
    work_ -= graph_.choices(state);
    std::sort(candidates.begin(), candidates.end());
    for (const Candidate& candidate : candidates) {
      if (work_ <= 0) {
        return best;
      }
      if (candidate.bound >= best * (1 - kSame)) {
        break;
      }
      const RecursionChoice choice = graph_.choice(state, candidate.index);
      solve_states_of(choice, memory, best);
      const double value = value_of(choice, memory);
      if (value < best) {
        best = value;
        note_found(state, memory, value);
      }
    }
    if (work_ > 0) {
      note_proved(state, memory, best);
    }
    return best;
  }

  double bound_of(const RecursionChoice& choice, Bytes memory) const {
    double sum = choice.cost;
    sum += choice.first < 0 ? 0 : lower(choice.first, memory - choice.held);
    return sum + (choice.second < 0 ? 0 : lower(choice.second, memory));
  }

  /// Until the choice is known to reach less than `best`, or not to.
  void solve_states_of(const RecursionChoice& choice, Bytes memory, double best) {
    double rest = choice.cost + (choice.second < 0 ? 0 : lower(choice.second, memory));
    const double first = choice.first < 0 ? 0 : solve(choice.first, memory - choice.held, best - rest);
    rest = choice.cost + first;
    if (choice.second >= 0 && rest + lower(choice.second, memory) < best) {
      solve(choice.second, memory, best - rest);
    }
  }

  const Graph& graph_;
  Bytes memory_;
  std::int64_t work_;
  Bytes unit_ = 1;
  std::size_t width_ = 0;
  std::vector<Bytes> least_;
  std::vector<Fastest> fastest_;
  std::vector<double> low_;    // by state, then by units of memory: no less
  std::vector<double> high_;   // likewise: a solution's value
  std::vector<Steps> found_;   // values of solutions, which more memory allows too
  std::vector<Steps> proved_;  // bounds, which less memory has too
};

}  // namespace hydra
