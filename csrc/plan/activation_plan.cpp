#include "csrc/plan/activation_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "csrc/plan/chain.h"

namespace hydra {

namespace {

using SegmentChain = std::vector<ActivationSegment>;
using OptionChain = std::vector<ActivationOption>;

constexpr double kNoSeconds = std::numeric_limits<double>::infinity();

void check_activation_segment(const ActivationSegment& segment, std::size_t number) {
  const SegmentCoding coding = segment.coding.value_or(SegmentCoding());
  const SecondForward second = segment.freedom.second.value_or(SecondForward());
  for (const double seconds : {segment.forward_seconds, segment.backward_seconds, coding.seconds, second.seconds}) {
    HYDRA_EXPECT(std::isfinite(seconds) && seconds >= 0, PlanError,
                 "segment " + std::to_string(number) + ": its seconds are negative or not finite");
  }
  for (const Bytes bytes :
       {segment.saved.fresh, segment.saved.all, segment.inputs.fresh, segment.inputs.all, segment.parked_bytes,
        segment.forward_bytes, segment.backward_bytes, segment.gradients.live, segment.weight_bytes, segment.slot_bytes,
        segment.gradients.all, coding.stream_bytes, second.bytes}) {
    HYDRA_EXPECT(bytes >= 0 && bytes < Bytes{1} << 40, PlanError,
                 "segment " + std::to_string(number) + ": its bytes are negative, or too many to count");
  }
  const auto is_allowed = [&](ActivationOption option) { return allows(segment, option, 1); };
  HYDRA_EXPECT(std::ranges::any_of(kActivationOptions, is_allowed), PlanError,
               "segment " + std::to_string(number) + " allows no option");
}

void check_activation_problem(const ActivationProblem& problem) {
  HYDRA_EXPECT(!problem.cuts.empty(), PlanError, "a step needs its segments, in one cut at least");
  HYDRA_EXPECT(problem.microbatches > 0 && problem.microbatches < 1 << 10, PlanError,
               "a step has 1 to 1023 microbatches; " + std::to_string(problem.microbatches) + " were given");
  for (const int size : problem.round_sizes) {
    HYDRA_EXPECT(size > 0 && size <= problem.microbatches, PlanError,
                 "a round has 1 to " + std::to_string(problem.microbatches) + " microbatches, those of a step; " +
                     std::to_string(size) + " were given");
  }
  HYDRA_EXPECT(problem.machine.to_device > 0 && problem.machine.to_host > 0, PlanError,
               "the lanes need more than 0 bytes a second");
  HYDRA_EXPECT(problem.machine.disk >= 0, PlanError, "the disk has less than 0 bytes a second");
  HYDRA_EXPECT(std::isfinite(problem.machine.update_seconds) && problem.machine.update_seconds >= 0, PlanError,
               "the optimizer's seconds are negative or not finite");
  for (const SegmentChain& segments : problem.cuts) {
    HYDRA_EXPECT(!segments.empty() && segments.size() < 1 << 12, PlanError,
                 "a cut has 1 to 4095 segments; " + std::to_string(segments.size()) + " were given");
    for (std::size_t i = 0; i < segments.size(); ++i) {
      check_activation_segment(segments[i], i);
    }
  }
}

void check_treatment(const ActivationProblem& problem, std::size_t cut, const ActivationTreatment& treatment) {
  HYDRA_EXPECT(cut < problem.cuts.size() && treatment.options.size() == problem.cuts[cut].size(), PlanError,
               "a treatment has one option for each segment of a cut");
  HYDRA_EXPECT(treatment.round_size > 0 && treatment.round_size <= problem.microbatches, PlanError,
               "a round has 1 to " + std::to_string(problem.microbatches) + " microbatches; " +
                   std::to_string(treatment.round_size) + " were given");
  HYDRA_EXPECT(treatment.stash_bytes >= 0 && treatment.stash_bytes < Bytes{1} << 50, PlanError,
               "the stash's bytes are negative, or too many to count");
  for (std::size_t i = 0; i < treatment.options.size(); ++i) {
    HYDRA_EXPECT(allows(problem.cuts[cut][i], treatment.options[i], treatment.round_size), PlanError,
                 "segment " + std::to_string(i) + " does not allow its option in rounds of " +
                     std::to_string(treatment.round_size));
  }
}

ActivationPlan judged_plan(const ActivationProblem& problem, std::size_t cut, const ActivationTreatment& treatment,
                           StepRecord* record = nullptr) {
  const SegmentChain& segments = problem.cuts[cut];
  return {cut, treatment, simulate_step(segments, problem.machine, problem.microbatches, treatment, record),
          peak_bytes(segments, treatment)};
}

std::vector<int> tried_round_sizes(const ActivationProblem& problem) {
  return problem.round_sizes.empty() ? round_sizes(problem.microbatches) : problem.round_sizes;
}

/// The option with which the segment needs and keeps the least.
ActivationOption frugal_option(const ActivationSegment& segment, int round_size) {
  using enum ActivationOption;
  std::optional<ActivationOption> best;
  for (const ActivationOption option : {kOffload, kCompress, kRecomputeOffloaded, kRecompute, kKeep}) {
    if (allows(segment, option, round_size) &&
        (!best || needed_bytes(segment, option, round_size) < needed_bytes(segment, *best, round_size))) {
      best = option;
    }
  }
  return best.value_or(kOffload);  // not allowed, so no treatment with it fits
}

OptionChain frugal_options(const SegmentChain& segments, int round_size) {
  OptionChain options;
  for (const ActivationSegment& segment : segments) {
    options.push_back(frugal_option(segment, round_size));
  }
  return options;
}

/// What one second of each counts.
struct LaneWeights {
  double compute = 1;
  double lanes = 1;
};

/// Which options a candidate may use, where the segment allows another one too.
struct OptionSet {
  bool offloads = true;    // and compresses
  bool recomputes = true;  // from inputs that stay
  bool recomputes_offloaded = true;

  bool has(ActivationOption option) const {
    switch (option) {
      case ActivationOption::kKeep:
        return true;
      case ActivationOption::kRecompute:
        return recomputes;
      case ActivationOption::kRecomputeOffloaded:
        return recomputes_offloaded;
      default:
        return offloads;
    }
  }
};

/// What candidates share.
struct TreatmentSetting {
  std::size_t cut = 0;
  int round_size = 1;
  Bytes stash_bytes = 0;
  Bytes reserved = 0;  // for weights that stay
};

/// The cheapest options by dynamic programming over kept bytes.
class CheapestOptions {
 public:
  CheapestOptions(const ActivationProblem& problem, const TreatmentSetting& setting)
      : problem_(problem), setting_(setting), segments_(problem.cuts[setting.cut]) {
    Bytes kept = 0;
    for (const ActivationSegment& segment : segments_) {
      kept += setting.round_size * kept_bytes(segment, ActivationOption::kKeep);
    }
    room_ = problem.machine.budget - setting.stash_bytes - setting.reserved;
    constexpr auto kUnits = static_cast<Bytes>(kCells);
    unit_ = std::max<Bytes>(1, (std::clamp<Bytes>(room_, 0, kept) + kUnits - 1) / kUnits);
  }

  /// The work of one call of find(), in simulated segments of one microbatch.
  std::int64_t work() const { return static_cast<std::int64_t>(segments_.size()) * 128; }

  std::optional<OptionChain> find(const LaneWeights& weights, const OptionSet& set) const {
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

 private:
  static constexpr std::size_t kCells = 512;

  /// From k cells kept before the segment to k + cells, for k < end.
  struct Move {
    std::size_t cells;
    std::size_t end;
    double cost;
  };

  std::optional<Move> move_of(const ActivationSegment& segment, ActivationOption option, const LaneWeights& weights,
                              const OptionSet& set) const {
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

  Bytes needed_bytes_if_allowed(const ActivationSegment& segment, ActivationOption option) const {
    return allows(segment, option, setting_.round_size) ? needed_bytes(segment, option, setting_.round_size) : 0;
  }

  OptionChain options_to(std::size_t cell, const std::vector<std::vector<double>>& costs, const LaneWeights& weights,
                         const OptionSet& set) const {
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

  const ActivationProblem& problem_;
  const TreatmentSetting& setting_;
  const SegmentChain& segments_;
  Bytes room_ = 0;  // for all else
  Bytes unit_ = 1;
};

/// A treatment of a cut, and its seconds.
struct JudgedTreatment {
  std::size_t cut = 0;
  ActivationTreatment treatment;
  double seconds = kNoSeconds;
};

/// The last few of a row of budgets that grow by a tenth, and the given one. Neighbouring budgets share them, so that
/// their treatments have a common origin: seconds are less uneven, and fewer in the mean.
std::vector<Bytes> rising_budgets(Bytes least, Bytes budget) {
  constexpr std::size_t kShared = 3;
  std::vector<Bytes> budgets;
  for (Bytes shared = least; shared < budget; shared += std::min(shared / 10 + 1, budget - shared)) {
    budgets.push_back(shared);
  }
  if (budgets.size() > kShared) {
    budgets.erase(budgets.begin(), budgets.end() - kShared);
  }
  budgets.push_back(budget);
  return budgets;
}

/// Numbers for choices, the same in every run.
class SearchDraws {
 public:
  std::size_t below(std::size_t end) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>(state_ >> 33) % end;
  }

 private:
  std::uint64_t state_ = 1;
};

class ActivationSearch {
 public:
  ActivationSearch(const ActivationProblem& problem, double effort)
      : problem_(problem), round_sizes_(tried_round_sizes(problem)), work_(static_cast<std::int64_t>(effort * kWork)) {}

  /// Not slower than a treatment that fits, if one is known.
  JudgedTreatment find(JudgedTreatment known) {
    std::vector<Start> starts = candidates();
    if (known.seconds < kNoSeconds) {
      known.seconds = seconds_of(known.cut, known.treatment);
      starts.insert(starts.begin(), Start{{}, std::move(known)});
    }
    // Half of the work that is left, in equal shares; the rest is for changed copies.
    const std::size_t count = std::min(kStarts, starts.size());
    const std::int64_t all = work_;
    for (std::size_t i = 0; i < count; ++i) {
      climb(starts[i].best, all - all / 2 * static_cast<std::int64_t>(i + 1) / static_cast<std::int64_t>(count));
    }
    for (int fruitless = 0; work_ > 0 && fruitless < kFruitless && best_.seconds < kNoSeconds; ++fruitless) {
      const double before = best_.seconds;
      JudgedTreatment changed = perturbed(best_);
      climb(changed, 0);
      fruitless = best_.seconds < before ? 0 : fruitless;
    }
    return best_;
  }

 private:
  static constexpr double kWork = 1.5e7;
  static constexpr std::size_t kAsked = 24;  // settings that are asked all questions
  static constexpr std::size_t kStarts = 8;  // of the local search
  static constexpr int kFruitless = 200;

  struct Start {
    TreatmentSetting setting;
    JudgedTreatment best;
  };

  /// Settings with their fastest candidates, the fastest first.
  std::vector<Start> candidates() {
    std::vector<Start> starts;
    for (const TreatmentSetting& setting : settings()) {
      Start start = {setting, {setting.cut, {{}, setting.round_size, setting.stash_bytes}, kNoSeconds}};
      offer(start, frugal_options(problem_.cuts[setting.cut], setting.round_size));
      for (const ActivationOption option : kActivationOptions) {
        offer(start, uniform_options(setting, option));
      }
      ask(start, {{{1, 1}, {}}});
      if (start.best.seconds < kNoSeconds) {
        starts.push_back(std::move(start));
      }
    }
    const auto faster = [](const Start& one, const Start& other) { return one.best.seconds < other.best.seconds; };
    std::stable_sort(starts.begin(), starts.end(), faster);
    for (std::size_t i = 0; i < std::min(kAsked, starts.size()) && work_ > 0; ++i) {
      ask(starts[i], {{{1, 1}, {.recomputes = false, .recomputes_offloaded = false}},
                      {{1, 1}, {.offloads = false, .recomputes_offloaded = false}}});
      if (starts[i].setting.stash_bytes > 0) {
        ask(starts[i], {{{1, 0.02}, {}}, {{1, 0.1}, {}}, {{1, 0.25}, {}}, {{1, 0.5}, {}}, {{1, 3}, {}}});
      }
    }
    std::stable_sort(starts.begin(), starts.end(), faster);
    return starts;
  }

  std::vector<TreatmentSetting> settings() const {
    std::vector<TreatmentSetting> found;
    for (std::size_t cut = 0; cut < problem_.cuts.size(); ++cut) {
      Bytes weights = 0;
      for (const ActivationSegment& segment : problem_.cuts[cut]) {
        weights += segment.weight_bytes;
      }
      for (const int round_size : round_sizes_) {
        for (const Bytes stash_bytes : stash_sizes(problem_.cuts[cut])) {
          // The cheapest options do not know that weights that stay need not come again.
          for (const Bytes reserved :
               weights > 0 ? std::vector<Bytes>{0, weights / 2, weights} : std::vector<Bytes>{0}) {
            found.push_back({cut, round_size, stash_bytes, reserved});
          }
        }
      }
    }
    return found;
  }

  /// The option wherever it is allowed, else keep, else what needs the least.
  OptionChain uniform_options(const TreatmentSetting& setting, ActivationOption option) const {
    const SegmentChain& segments = problem_.cuts[setting.cut];
    OptionChain options = frugal_options(segments, setting.round_size);
    for (std::size_t i = 0; i < segments.size(); ++i) {
      if (allows(segments[i], option, setting.round_size)) {
        options[i] = option;
      } else if (allows(segments[i], ActivationOption::kKeep, setting.round_size)) {
        options[i] = ActivationOption::kKeep;
      }
    }
    return options;
  }

  void offer(Start& start, OptionChain options) {
    ActivationTreatment treatment = {std::move(options), start.setting.round_size, start.setting.stash_bytes};
    const double seconds = seconds_of(start.setting.cut, treatment);
    if (seconds < start.best.seconds) {
      start.best = {start.setting.cut, std::move(treatment), seconds};
    }
  }

  void ask(Start& start, std::initializer_list<std::pair<LaneWeights, OptionSet>> questions) {
    const CheapestOptions cheapest(problem_, start.setting);
    for (const auto& [weights, set] : questions) {
      work_ -= cheapest.work();
      if (std::optional<OptionChain> options = cheapest.find(weights, set)) {
        offer(start, std::move(*options));
      }
    }
  }

  double seconds_of(std::size_t cut, const ActivationTreatment& treatment) {
    const SegmentChain& segments = problem_.cuts[cut];
    for (std::size_t i = 0; i < segments.size(); ++i) {
      if (!allows(segments[i], treatment.options[i], treatment.round_size)) {
        return kNoSeconds;
      }
    }
    const ActivationMachine& machine = problem_.machine;
    work_ -= static_cast<std::int64_t>(segments.size()) + 40;
    if (peak_bytes(segments, treatment) > machine.budget || !fits_host(segments, treatment, machine)) {
      return kNoSeconds;
    }
    const auto [known, is_new] = seen_.try_emplace(key_of(cut, treatment), kNoSeconds);
    if (is_new) {
      work_ -= 2 * problem_.microbatches * static_cast<std::int64_t>(segments.size());
      known->second = simulate_step(segments, machine, problem_.microbatches, treatment).seconds;
      if (is_better(cut, treatment, known->second)) {
        best_ = {cut, treatment, known->second};
      }
    }
    return known->second;
  }

  /// Of treatments that are equally fast, the one that moves less: a link that is free is none that was measured well.
  bool is_better(std::size_t cut, const ActivationTreatment& treatment, double seconds) const {
    if (seconds != best_.seconds || seconds == kNoSeconds) {
      return seconds < best_.seconds;
    }
    const auto moved = [&](std::size_t which, const ActivationTreatment& of) {
      return host_bytes(problem_.cuts[which], of) / of.round_size;
    };
    return moved(cut, treatment) < moved(best_.cut, best_.treatment);
  }

  static std::string key_of(std::size_t cut, const ActivationTreatment& treatment) {
    std::string key = std::to_string(cut) + ',' + std::to_string(treatment.round_size) + ',' +
                      std::to_string(treatment.stash_bytes) + ',';
    for (const ActivationOption option : treatment.options) {
      key += static_cast<char>('a' + static_cast<int>(option));
    }
    return key;
  }

  /// Takes the change if it makes the treatment faster.
  template <typename Change>
  bool improve(JudgedTreatment& here, const Change& change) {
    ActivationTreatment changed = here.treatment;
    change(changed);
    const double seconds = seconds_of(here.cut, changed);
    if (seconds >= here.seconds) {
      return false;
    }
    here.treatment = std::move(changed);
    here.seconds = seconds;
    return true;
  }

  /// To a treatment that no change of one or two segments, rounds or stash makes faster, while work is left.
  void climb(JudgedTreatment& here, std::int64_t until) {
    for (bool improved = true; improved && work_ > until;) {
      improved = change_setting(here, until) || change_one(here, until);
      improved = improved || change_two(here, until);
    }
  }

  bool change_setting(JudgedTreatment& here, std::int64_t until) {
    bool improved = false;
    for (const int round_size : round_sizes_) {
      improved |= work_ > until && improve(here, [&](ActivationTreatment& it) { it.round_size = round_size; });
    }
    for (const Bytes stash_bytes : stash_sizes(problem_.cuts[here.cut])) {
      improved |= work_ > until && improve(here, [&](ActivationTreatment& it) { it.stash_bytes = stash_bytes; });
    }
    return improved;
  }

  bool change_one(JudgedTreatment& here, std::int64_t until) {
    bool improved = false;
    const std::size_t count = here.treatment.options.size();
    const std::size_t first = draws_.below(count);
    for (std::size_t i = 0; i < count; ++i) {
      for (const ActivationOption option : kActivationOptions) {
        improved |=
            work_ > until && improve(here, [&](ActivationTreatment& it) { it.options[(first + i) % count] = option; });
      }
    }
    return improved;
  }

  /// Neighbours of a pair that works are not better placed than others, so one improvement is enough.
  bool change_two(JudgedTreatment& here, std::int64_t until) {
    const std::size_t count = here.treatment.options.size();
    const std::size_t first = draws_.below(count);
    for (std::size_t distance = 1; distance < count; ++distance) {
      for (std::size_t k = 0; k + distance < count + first && k < count; ++k) {
        const std::size_t i = (first + k) % count;
        const std::size_t j = (i + distance) % count;
        for (const ActivationOption one : kActivationOptions) {
          for (const ActivationOption other : kActivationOptions) {
            if (work_ <= until) {
              return false;
            }
            if (improve(here, [&](ActivationTreatment& it) {
                  it.options[i] = one;
                  it.options[j] = other;
                })) {
              return true;
            }
          }
        }
      }
    }
    return false;
  }

  /// A copy with some other options, one that fits.
  JudgedTreatment perturbed(const JudgedTreatment& from) {
    JudgedTreatment changed = from;
    for (int attempt = 0; attempt < 20; ++attempt) {
      changed.treatment = from.treatment;
      const std::size_t changes = 2 + draws_.below(3);
      for (std::size_t k = 0; k < changes; ++k) {
        changed.treatment.options[draws_.below(from.treatment.options.size())] =
            kActivationOptions[draws_.below(kActivationOptions.size())];
      }
      changed.seconds = seconds_of(changed.cut, changed.treatment);
      if (changed.seconds < kNoSeconds) {
        break;
      }
    }
    return changed;
  }

  const ActivationProblem& problem_;
  const std::vector<int> round_sizes_;
  std::int64_t work_;
  JudgedTreatment best_;
  std::unordered_map<std::string, double> seen_;
  SearchDraws draws_;
};

}  // namespace

Bytes least_budget(const ActivationProblem& problem) {
  check_activation_problem(problem);
  Bytes least = std::numeric_limits<Bytes>::max();
  for (const SegmentChain& segments : problem.cuts) {
    for (const int round_size : tried_round_sizes(problem)) {
      least = std::min(least, peak_bytes(segments, {frugal_options(segments, round_size), round_size, 0}));
    }
  }
  return least;
}

std::vector<int> round_sizes(int microbatches) {
  std::vector<int> sizes = {microbatches, (microbatches + 1) / 2, (microbatches + 2) / 3};
  for (int size = 1; size < microbatches; size *= 2) {
    sizes.push_back(size);
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

std::vector<Bytes> stash_sizes(const std::vector<ActivationSegment>& segments) {
  Bytes largest = 0;
  for (const ActivationSegment& segment : segments) {
    largest = std::max(largest, segment.saved.fresh);
  }
  return largest == 0 ? std::vector<Bytes>{0} : std::vector<Bytes>{0, largest, 2 * largest, 5 * largest};
}

ActivationPlan plan_activations(const ActivationProblem& problem, double effort) {
  const Bytes least = least_budget(problem);
  if (least > problem.machine.budget) {
    throw PlanDoesNotFit("no treatment of activations fits " + human_bytes(problem.machine.budget) +
                             ": give at least " + std::to_string(least) + " bytes",
                         0, least, problem.machine.budget);
  }
  const std::vector<Bytes> budgets = rising_budgets(least, problem.machine.budget);
  ActivationProblem smaller = problem;
  JudgedTreatment found;
  for (const Bytes budget : budgets) {
    smaller.machine.budget = budget;
    found = ActivationSearch(smaller, effort / static_cast<double>(budgets.size())).find(std::move(found));
  }
  HYDRA_EXPECT(found.seconds < kNoSeconds, PlanError,
               "no treatment of activations was found that fits both " + human_bytes(problem.machine.budget) +
                   " on the device and " + human_bytes(problem.machine.host_bytes) +
                   " on the host: give more of either");
  return judged_plan(problem, found.cut, found.treatment);
}

ActivationPlan judge_activations(const ActivationProblem& problem, std::size_t cut,
                                 const ActivationTreatment& treatment, StepRecord* record) {
  check_activation_problem(problem);
  check_treatment(problem, cut, treatment);
  const Bytes peak = peak_bytes(problem.cuts[cut], treatment);
  if (peak > problem.machine.budget) {
    throw PlanDoesNotFit("the treatment does not fit " + human_bytes(problem.machine.budget) + ": it takes " +
                             std::to_string(peak) + " bytes",
                         0, peak, problem.machine.budget);
  }
  return judged_plan(problem, cut, treatment, record);
}

}  // namespace hydra
