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
#include "csrc/plan/cheapest_options.h"

namespace hydra {

namespace {

using SegmentChain = std::vector<ActivationSegment>;

constexpr double kMostEffort = 1000;

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
  HYDRA_EXPECT(problem.machine.host_bytes >= 0, PlanError, "the host has less than 0 bytes for activations");
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

/// The options with the lowest peak; null if a segment allows none in rounds of this size. What a segment keeps adds to
/// what all later ones need, so they are found from the last one on.
std::optional<OptionChain> frugal_options(const SegmentChain& segments, int round_size) {
  using enum ActivationOption;
  OptionChain options(segments.size());
  Bytes behind = 0;  // the peak of later segments, beside what is kept before them
  for (std::size_t i = segments.size(); i-- > 0;) {
    std::optional<std::pair<Bytes, Bytes>> least;  // the peak from here on, and what the segment itself needs
    for (const ActivationOption option : {kOffload, kCompress, kRecomputeOffloaded, kRecompute, kKeep}) {
      if (!allows(segments[i], option, round_size)) {
        continue;
      }
      const Bytes needed = needed_bytes(segments[i], option, round_size);
      const Bytes kept = round_size * kept_bytes(segments[i], option);
      const std::pair found = {std::max(needed, kept + behind), needed};
      if (!least || found < *least) {
        least = found;
        options[i] = option;
      }
    }
    if (!least) {
      return std::nullopt;
    }
    behind = least->first;
  }
  return options;
}

/// A treatment of a cut, and its seconds.
struct JudgedTreatment {
  std::size_t cut = 0;
  ActivationTreatment treatment;
  double seconds = kNoSeconds;
};

/// The last few of a row of budgets that grow by a tenth, and the given one. Neighbouring budgets share them, so that
/// their treatments have a common origin: seconds are less uneven, and fewer in the mean.
std::vector<Bytes> rising_budgets(Bytes least, Bytes budget) {
  constexpr std::size_t kShared = 4;
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
  explicit SearchDraws(std::uint64_t seed = 1) : state_(seed) {}

  std::size_t below(std::size_t end) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>(state_ >> 33) % end;
  }

 private:
  std::uint64_t state_;
};

class ActivationSearch {
 public:
  /// `number`: of the search in a row of them. Where there are too many settings, each search tries others.
  ActivationSearch(const ActivationProblem& problem, double effort, std::size_t number)
      : problem_(problem),
        round_sizes_(tried_round_sizes(problem)),
        number_(number),
        work_(static_cast<std::int64_t>(effort * kWork)) {}

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
  static constexpr std::int64_t kForSettings = 1'000'000;  // of work, however small the effort
  static constexpr std::size_t kAsked = 24;                // settings that are asked all questions
  static constexpr std::size_t kStarts = 8;                // of the local search
  static constexpr int kFruitless = 200;

  struct Start {
    TreatmentSetting setting;
    JudgedTreatment best;
  };

  /// Settings with their fastest candidates, the fastest first.
  std::vector<Start> candidates() {
    std::vector<Start> starts;
    const std::int64_t until = work_ - std::max(work_ / 2, kForSettings);
    std::vector<TreatmentSetting> tried = settings();
    const bool are_too_many = work_of(tried) > work_ - until;
    if (are_too_many) {
      shuffle(tried);
    }
    for (const TreatmentSetting& setting : tried) {
      if (are_too_many && work_ < until && !starts.empty()) {
        break;
      }
      const OptionChain frugal = frugal_options(problem_.cuts[setting.cut], setting.round_size).value_or(OptionChain());
      Start start = {setting, {setting.cut, {{}, setting.round_size, setting.stash_bytes}, kNoSeconds}};
      offer(start, frugal);
      for (const ActivationOption option : kActivationOptions) {
        offer(start, uniform_options(setting, frugal, option));
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

  /// Those that some treatment fits.
  std::vector<TreatmentSetting> settings() const {
    std::vector<TreatmentSetting> found;
    for (std::size_t cut = 0; cut < problem_.cuts.size(); ++cut) {
      Bytes weights = 0;
      for (const ActivationSegment& segment : problem_.cuts[cut]) {
        weights += segment.weight_bytes;
      }
      for (const int round_size : round_sizes_) {
        const std::optional<OptionChain> frugal = frugal_options(problem_.cuts[cut], round_size);
        for (const Bytes stash_bytes : stash_sizes(problem_.cuts[cut])) {
          if (!frugal || peak_bytes(problem_.cuts[cut], {*frugal, round_size, stash_bytes}) > problem_.machine.budget) {
            continue;
          }
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

  /// At most, with all candidates.
  std::int64_t work_of(const std::vector<TreatmentSetting>& tried) const {
    std::int64_t work = 0;
    for (const TreatmentSetting& setting : tried) {
      const auto count = static_cast<std::int64_t>(problem_.cuts[setting.cut].size());
      const std::int64_t simulated = count + 40 + 2 * problem_.microbatches * count;
      work += static_cast<std::int64_t>(kActivationOptions.size() + 2) * simulated + CheapestOptions::work(count);
    }
    return work;
  }

  /// Into an order without a pattern.
  void shuffle(std::vector<TreatmentSetting>& tried) const {
    SearchDraws draws(number_ + 1);
    for (std::size_t left = tried.size(); left > 1; --left) {
      std::swap(tried[left - 1], tried[draws.below(left)]);
    }
  }

  /// The option wherever it is allowed, else keep, else what needs the least.
  OptionChain uniform_options(const TreatmentSetting& setting, const OptionChain& frugal,
                              ActivationOption option) const {
    const SegmentChain& segments = problem_.cuts[setting.cut];
    OptionChain options = frugal;
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
      work_ -= CheapestOptions::work(static_cast<std::int64_t>(problem_.cuts[start.setting.cut].size()));
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
  const std::size_t number_;
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
      if (const std::optional<OptionChain> frugal = frugal_options(segments, round_size)) {
        least = std::min(least, peak_bytes(segments, {*frugal, round_size, 0}));
      }
    }
  }
  HYDRA_EXPECT(
      least < std::numeric_limits<Bytes>::max(), PlanError,
      "in every cut a segment allows no option in rounds of the given sizes: give other sizes, or other options");
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
  HYDRA_EXPECT(effort >= 0 && effort <= kMostEffort, PlanError, "the effort is not from 0 to 1000");
  const Bytes least = least_budget(problem);
  if (least > problem.machine.budget) {
    throw PlanDoesNotFit("no treatment of activations fits " + human_bytes(problem.machine.budget) +
                             ": give at least " + std::to_string(least) + " bytes",
                         0, least, problem.machine.budget);
  }
  const std::vector<Bytes> budgets = rising_budgets(least, problem.machine.budget);
  ActivationProblem smaller = problem;
  JudgedTreatment found;
  for (std::size_t number = 0; number < budgets.size(); ++number) {
    smaller.machine.budget = budgets[number];
    found = ActivationSearch(smaller, effort / static_cast<double>(budgets.size()), number).find(std::move(found));
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
