#include "csrc/plan/jobs/makespan_bound.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <set>
#include <vector>

namespace hydra {

namespace {

constexpr double kRoundingOfBound = 1e-12;  // relative, of sums
constexpr int kBisections = 40;
constexpr int kMostMultiples = 12;      // the largest k of u(k), for GPUs
constexpr int kMostTimeMultiples = 40;  // for seconds
constexpr int kMostFactor = 8;          // by which an option's seconds are steps
constexpr std::size_t kMostSizes = 24;  // of GPUs or seconds that are tried as a threshold
constexpr std::size_t kMostSteps = 64;  // of makespans that are tried first

/// What sizes count, as parts of a whole. The dual feasible functions of Fekete and Schepers (2001).
class Scale {
 public:
  static Scale plain() { return {Kind::kPlain, 0}; }
  static Scale multiple(int k) { return {Kind::kMultiple, static_cast<double>(k)}; }
  static Scale threshold(double least) { return {Kind::kThreshold, least}; }

  double operator()(double part) const {
    switch (kind_) {
      case Kind::kPlain:
        return part;
      case Kind::kMultiple: {
        const double scaled = part * (value_ + 1);
        const double whole = std::floor(scaled * (1 + kRoundingOfBound));
        return scaled - whole <= kRoundingOfBound * scaled ? part : whole / value_;
      }
      case Kind::kThreshold:
        return part > 1 - value_ + kRoundingOfBound ? 1 : part < value_ ? 0 : part;
    }
    return part;
  }

 private:
  enum class Kind { kPlain, kMultiple, kThreshold };

  Scale(Kind kind, double value) : kind_(kind), value_(value) {}

  Kind kind_;
  double value_;
};

/// The weights of GPU counts, and how much of them all nodes hold.
struct GpuWeights {
  std::vector<double> of;  // by GPUs
  double all_nodes = 0;
};

/// So many of them at most, evenly among all.
template <typename Value>
std::vector<Value> evenly(const std::set<Value>& values, std::size_t most) {
  const std::vector<Value> all(values.begin(), values.end());
  const std::size_t count = std::min(most, all.size());
  std::vector<Value> chosen;
  for (std::size_t i = 0; i < count; ++i) {
    chosen.push_back(all[i * all.size() / count]);
  }
  return chosen;
}

std::set<int> gpu_counts(const OptionTable& table) {
  std::set<int> counts;
  for (std::size_t job = 0; job < table.jobs(); ++job) {
    for (const UsefulOption& option : table.of(job)) {
      counts.insert(option.gpus);
    }
  }
  return counts;
}

GpuWeights weights_of(const OptionTable& table, const std::set<int>& counts, int whole, const Scale& scale) {
  const auto size = static_cast<std::size_t>(table.largest_node()) + 1;
  GpuWeights weights{std::vector<double>(size, 0.0), 0};
  for (const int gpus : counts) {
    weights.of[static_cast<std::size_t>(gpus)] = scale(static_cast<double>(gpus) / whole);
  }
  std::vector<double> most(size, 0.0);  // that so many GPUs hold
  for (std::size_t room = 1; room < size; ++room) {
    most[room] = most[room - 1];
    for (const int gpus : counts) {
      const auto used = static_cast<std::size_t>(gpus);
      if (used <= room) {
        most[room] = std::max(most[room], most[room - used] + weights.of[used]);
      }
    }
  }
  for (const int gpus : table.nodes()) {
    weights.all_nodes += most[static_cast<std::size_t>(gpus)];
  }
  return weights;
}

std::vector<GpuWeights> all_weights(const OptionTable& table) {
  const std::set<int> counts = gpu_counts(table);
  const std::set<int> sizes(table.nodes().begin(), table.nodes().end());
  std::vector<GpuWeights> found = {weights_of(table, counts, table.largest_node(), Scale::plain())};
  for (const int whole : sizes) {
    for (int k = 1; k <= kMostMultiples; ++k) {
      found.push_back(weights_of(table, counts, whole, Scale::multiple(k)));
    }
    for (const int least : evenly(counts, kMostSizes)) {
      if (2 * least <= whole) {
        found.push_back(weights_of(table, counts, whole, Scale::threshold(static_cast<double>(least) / whole)));
      }
    }
  }
  return found;
}

/// Whether no schedule has a makespan of `limit` or less.
bool is_refuted(const OptionTable& table, const GpuWeights& weights, const Scale& scale, double limit) {
  double total = 0;
  for (std::size_t job = 0; job < table.jobs(); ++job) {
    double least = std::numeric_limits<double>::infinity();
    for (const UsefulOption& option : table.of(job)) {
      if (option.seconds <= limit) {
        least = std::min(least, weights.of[static_cast<std::size_t>(option.gpus)] * scale(option.seconds / limit));
      }
    }
    total += least;
  }
  return total > weights.all_nodes * (1 + kRoundingOfBound * static_cast<double>(table.jobs() + 1));
}

/// Parts of `limit` that options take, up to a half, evenly among all.
std::vector<double> thresholds(const OptionTable& table, double limit) {
  std::set<double> parts;
  for (std::size_t job = 0; job < table.jobs(); ++job) {
    for (const UsefulOption& option : table.of(job)) {
      const double part = option.seconds / limit;
      if (part > 0 && part < 1) {
        parts.insert(std::min(part, 1 - part));
      }
    }
  }
  return evenly(parts, kMostSizes);
}

class Refutation {
 public:
  explicit Refutation(const OptionTable& table) : table_(table), weights_(all_weights(table)) {}

  bool refutes(double limit) const {
    std::vector<Scale> scales = {Scale::plain()};
    for (int k = 1; k <= kMostTimeMultiples; ++k) {
      scales.push_back(Scale::multiple(k));
    }
    for (const double part : thresholds(table_, limit)) {
      scales.push_back(Scale::threshold(part));
    }
    return std::any_of(weights_.begin(), weights_.end(), [&](const GpuWeights& weights) {
      return std::any_of(scales.begin(), scales.end(),
                         [&](const Scale& scale) { return is_refuted(table_, weights, scale, limit); });
    });
  }

 private:
  const OptionTable& table_;
  std::vector<GpuWeights> weights_;
};

/// Makespans between the two below which an option fits less often, ascending: what counts is mostly lost there.
std::vector<double> steps_between(const OptionTable& table, double low, double high) {
  std::set<double> steps;
  for (std::size_t job = 0; job < table.jobs(); ++job) {
    for (const UsefulOption& option : table.of(job)) {
      for (int k = 1; k <= kMostFactor; ++k) {
        const double step = k * option.seconds * (1 - kRoundingOfBound);
        if (step > low && step < high) {
          steps.insert(step);
        }
      }
    }
  }
  std::vector<double> found = evenly(steps, kMostSteps);
  found.push_back(high * (1 - kRoundingOfBound));
  return found;
}

}  // namespace

double plain_bound(const OptionTable& table) {
  double area = 0;
  for (std::size_t job = 0; job < table.jobs(); ++job) {
    double least = std::numeric_limits<double>::infinity();
    for (const UsefulOption& option : table.of(job)) {
      least = std::min(least, option.area());
    }
    area += least;
  }
  return std::max(area / table.gpus(), table.longest_job());
}

double makespan_bound(const OptionTable& table, double known) {
  double bound = plain_bound(table);
  if (!(bound > 0) || bound >= known) {
    return std::min(bound, known);
  }
  const Refutation refutation(table);
  const std::vector<double> steps = steps_between(table, bound, known);
  double above = known;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (refutation.refutes(*step)) {
      bound = std::max(bound, *step);
      break;
    }
    above = *step;
  }
  for (int i = 0; i < kBisections && above - bound > kRoundingOfBound * above; ++i) {
    const double middle = bound + (above - bound) / 2;
    (refutation.refutes(middle) ? bound : above) = middle;
  }
  return bound;
}

}  // namespace hydra
