#include "csrc/plan/chain_partition.h"

#include <algorithm>
#include <compare>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace hydra {

namespace {

constexpr double kSamePeriod = 1e-12;  // relative

/// Sums over stages; the first decides, the second breaks ties.
struct BytesThenUnevenness {
  Bytes crossing_bytes = 0;
  double squared_seconds = 0;
  auto operator<=>(const BytesThenUnevenness&) const = default;
};

/// The best division for every number of stages and every end. `Value` is ordered; smaller is better.
template <typename Value>
class Table {
 public:
  /// `extend(before, range, stage, begin, end)` returns the value with one more stage, or nullopt if that stage is not
  /// allowed. It must not fall when `before` rises.
  template <typename Extend>
  Table(const StageCosts& costs, const Value& empty, const Extend& extend)
      : events_(costs.chain().size()), entries_(static_cast<std::size_t>(costs.terms().stages() + 1)) {
    for (std::vector<Entry>& row : entries_) {
      row.resize(static_cast<std::size_t>(events_ + 1));
    }
    entries_[0][0].value = empty;
    for (int end = 1; end <= events_; ++end) {
      if (costs.possible(end)) {
        const std::vector<EventRange> ranges = costs.ranges_ending_at(end);
        for (int stage = 0; stage < costs.terms().stages(); ++stage) {
          entry(stage + 1, end) = best(ranges, stage, end, extend);
        }
      }
    }
  }

  /// The value of the whole chain's best division, or nullopt if there is none.
  const std::optional<Value>& value() const { return entries_.back().back().value; }

  /// The beginnings of all stages, and the end of the last one.
  std::vector<int> bounds() const {
    std::vector<int> found = {events_};
    for (std::size_t stage = entries_.size() - 1; stage > 0; --stage) {
      found.push_back(entries_[stage][static_cast<std::size_t>(found.back())].begin);
    }
    std::reverse(found.begin(), found.end());
    return found;
  }

 private:
  struct Entry {
    std::optional<Value> value;
    int begin = 0;
  };

  Entry& entry(int stages, int end) {
    return entries_[static_cast<std::size_t>(stages)][static_cast<std::size_t>(end)];
  }

  template <typename Extend>
  Entry best(const std::vector<EventRange>& ranges, int stage, int end, const Extend& extend) {
    Entry found;
    for (int begin = stage; begin < end; ++begin) {
      const std::optional<Value>& before = entry(stage, begin).value;
      if (!before) {
        continue;
      }
      std::optional<Value> value = extend(*before, ranges[static_cast<std::size_t>(begin)], stage, begin, end);
      if (value && (!found.value || *value < *found.value)) {
        found = {std::move(value), begin};
      }
    }
    return found;
  }

  int events_;
  std::vector<std::vector<Entry>> entries_;  // by number of stages, then by end
};

Bytes crossing_bytes(const StageCosts& costs, int boundary) {
  return boundary == 0 ? 0 : costs.chain().boundaries[static_cast<std::size_t>(boundary - 1)].crossing_bytes;
}

/// The bytes that the stage needs above its limit.
Bytes lacking(const StageCosts& costs, const EventRange& range, int stage) {
  const std::optional<Bytes>& limit = costs.terms().limits[static_cast<std::size_t>(stage)];
  return limit ? costs.bytes(range, stage) - *limit : std::numeric_limits<Bytes>::min();
}

[[noreturn]] void throw_does_not_fit(const StageCosts& costs) {
  const Table<Bytes> table(costs, std::numeric_limits<Bytes>::min(),
                           [&](const Bytes& before, const EventRange& range, int stage, int, int) {
                             return std::optional(std::max(before, lacking(costs, range, stage)));
                           });
  const StageTerms& terms = costs.terms();
  HYDRA_EXPECT(table.value(), PlanError,
               std::to_string(terms.stages()) + " stages need " + std::to_string(terms.stages() - 1) +
                   " cuts, and the chain of " + std::to_string(costs.chain().size()) +
                   " events cannot be cut at so many places: use fewer stages");
  const std::vector<int> bounds = table.bounds();
  for (int stage = 0; stage < terms.stages(); ++stage) {
    const int begin = bounds[static_cast<std::size_t>(stage)];
    const int end = bounds[static_cast<std::size_t>(stage + 1)];
    const EventRange range = costs.ranges_ending_at(end)[static_cast<std::size_t>(begin)];
    if (lacking(costs, range, stage) == *table.value()) {
      const Bytes needed = costs.bytes(range, stage);
      const Bytes limit = *terms.limits[static_cast<std::size_t>(stage)];
      throw PlanDoesNotFit("no division into " + std::to_string(terms.stages()) + " stages fits: at best stage " +
                               std::to_string(stage) + ", events " + std::to_string(begin) + " to " +
                               std::to_string(end - 1) + ", needs " + human_bytes(needed) + " (" +
                               std::to_string(terms.versions) + " versions of " + human_bytes(range.parameter_bytes) +
                               " of parameters, activations of " + std::to_string(terms.in_flight(stage)) +
                               " microbatches of " + human_bytes(range.activation_bytes) + " each), and may hold " +
                               human_bytes(limit) +
                               ": allow more memory, recompute activations, or use another number of stages",
                           stage, needed, limit);
    }
  }
  throw PlanError("no stage lacks memory, and none fits");  // not reached: one stage has the table's value
}

double least_period(const StageCosts& costs) {
  const Table<double> table(
      costs, 0.0, [&](const double& before, const EventRange& range, int stage, int begin, int end) {
        return costs.fits(range, stage) ? std::optional(std::max(before, costs.seconds(range, begin, end)))
                                        : std::nullopt;
      });
  if (!table.value()) {
    throw_does_not_fit(costs);
  }
  return *table.value();
}

}  // namespace

ChainPartition partition_chain(const Chain& chain, const StageTerms& terms) {
  const StageCosts costs(chain, terms);
  const double longest = least_period(costs) * (1 + kSamePeriod);
  const Table<BytesThenUnevenness> table(
      costs, {}, [&](const BytesThenUnevenness& before, const EventRange& range, int stage, int begin, int end) {
        const double seconds = costs.seconds(range, begin, end);
        if (seconds > longest || !costs.fits(range, stage)) {
          return std::optional<BytesThenUnevenness>();
        }
        return std::optional<BytesThenUnevenness>(
            {before.crossing_bytes + crossing_bytes(costs, begin), before.squared_seconds + seconds * seconds});
      });
  const std::vector<int> bounds = table.bounds();
  ChainPartition partition;
  partition.crossing_bytes = table.value()->crossing_bytes;
  for (int stage = 0; stage < terms.stages(); ++stage) {
    const int begin = bounds[static_cast<std::size_t>(stage)];
    const int end = bounds[static_cast<std::size_t>(stage + 1)];
    const EventRange range = costs.ranges_ending_at(end)[static_cast<std::size_t>(begin)];
    const double seconds = costs.seconds(range, begin, end);
    partition.period_seconds = std::max(partition.period_seconds, seconds);
    partition.stages.push_back({begin, end, range.compute_seconds, costs.communication_seconds(begin, end), seconds,
                                costs.bytes(range, stage)});
  }
  return partition;
}

}  // namespace hydra
