#include "csrc/plan/checkpoint_chain.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>

#include "csrc/plan/chain.h"
#include "csrc/plan/recursion_search.h"

namespace hydra {

namespace {

constexpr int kMostStages = 1000;
constexpr int kMostFlatStages = 4000;

void check_checkpoint_stage(const CheckpointStage& stage, std::size_t number) {
  const bool times = std::isfinite(stage.forward_time) && std::isfinite(stage.backward_time) &&
                     stage.forward_time >= 0 && stage.backward_time >= 0;
  HYDRA_EXPECT(times, PlanError, "stage " + std::to_string(number + 1) + ": a time is negative or not finite");
  const Bytes least =
      std::min({stage.output_bytes, stage.saved_bytes, stage.forward_transient_bytes, stage.backward_transient_bytes});
  HYDRA_EXPECT(least >= 0, PlanError, "stage " + std::to_string(number + 1) + ": a number of bytes is negative");
}

void check_checkpoints(const CheckpointChain& chain, Bytes memory, CheckpointClass type) {
  HYDRA_EXPECT(!chain.stages.empty(), PlanError, "a chain without stages cannot be planned");
  const int most = type == CheckpointClass::kFlat ? kMostFlatStages : kMostStages;
  HYDRA_EXPECT(chain.stages.size() <= static_cast<std::size_t>(most), PlanError,
               "a chain of " + std::to_string(chain.stages.size()) +
                   " stages is too long: join stages until there are " + std::to_string(most));
  HYDRA_EXPECT(memory >= 0 && chain.input_bytes >= 0, PlanError, "the memory limit or the input's size is negative");
  double sum = static_cast<double>(chain.input_bytes);
  for (std::size_t i = 0; i < chain.stages.size(); ++i) {
    const CheckpointStage& stage = chain.stages[i];
    check_checkpoint_stage(stage, i);
    for (const Bytes bytes : {stage.output_bytes, stage.output_bytes, stage.saved_bytes, stage.forward_transient_bytes,
                              stage.backward_transient_bytes}) {
      sum += static_cast<double>(bytes);
    }
  }
  HYDRA_EXPECT(sum < 0x1p60, PlanError, "the bytes of all stages together are too many to count");
}

/// The chain's numbers by stage, in units of the sizes' greatest common divisor.
class ChainNumbers {
 public:
  explicit ChainNumbers(const CheckpointChain& chain) : stages_(chain.stages), values_{chain.input_bytes} {
    Bytes unit = chain.input_bytes;
    for (const CheckpointStage& stage : stages_) {
      values_.push_back(stage.output_bytes);
      for (const Bytes bytes :
           {stage.output_bytes, stage.saved_bytes, stage.forward_transient_bytes, stage.backward_transient_bytes}) {
        unit = std::gcd(unit, bytes);
      }
    }
    unit_ = std::max<Bytes>(unit, 1);
    for (Bytes& value : values_) {
      value /= unit_;
    }
    for (CheckpointStage& stage : stages_) {
      for (Bytes CheckpointStage::* bytes :
           {&CheckpointStage::output_bytes, &CheckpointStage::saved_bytes, &CheckpointStage::forward_transient_bytes,
            &CheckpointStage::backward_transient_bytes}) {
        stage.*bytes /= unit_;
      }
    }
  }

  int size() const { return static_cast<int>(stages_.size()); }
  Bytes unit() const { return unit_; }
  const CheckpointStage& stage(int index) const { return stages_[static_cast<std::size_t>(index)]; }
  /// The size of x[index].
  Bytes value(int index) const { return values_[static_cast<std::size_t>(index)]; }

  /// What a saving forward and the backward of a stage need beside its input, while the gradient of x[end] waits.
  Bytes keeping(int index, int end) const {
    const CheckpointStage& own = stage(index);
    return own.saved_bytes + std::max(value(end) + own.forward_transient_bytes,
                                      value(index + 1) + value(index) + own.backward_transient_bytes);
  }

  /// What a plain forward of a stage needs beside the input of stage `begin` and the gradient.
  Bytes passing(int index, int begin) const {
    return (index > begin ? value(index) : 0) + value(index + 1) + stage(index).forward_transient_bytes;
  }

 private:
  std::vector<CheckpointStage> stages_;
  std::vector<Bytes> values_;
  Bytes unit_ = 1;
};

/// A number for each range of stages. Shorter ranges have smaller numbers.
class StageRanges {
 public:
  explicit StageRanges(int size) : size_(size) {}

  int count() const { return size_ * (size_ + 1) / 2; }
  int number(int begin, int last) const {
    const int shorter = last - begin;  // lengths below this one have size, size - 1, ... ranges
    return shorter * size_ - shorter * (shorter - 1) / 2 + begin;
  }

 private:
  int size_;
};

/// States are ranges of stages; the range's input is held beside the memory, and its gradient is in it.
class PersistentGraph {
 public:
  explicit PersistentGraph(const ChainNumbers& numbers) : numbers_(numbers), ranges_(numbers.size()) {
    const int size = numbers.size();
    places_.resize(static_cast<std::size_t>(ranges_.count()));
    for (int begin = 0; begin < size; ++begin) {
      Place place = {begin, begin, 0, 0};
      for (; place.last < size; ++place.last) {
        place.passing = std::max(place.passing, numbers.passing(place.last, begin));
        place.forward += numbers.stage(place.last).forward_time;
        places_[static_cast<std::size_t>(ranges_.number(begin, place.last))] = place;
      }
    }
  }

  int states() const { return ranges_.count(); }
  int choices(int state) const { return place(state).last - place(state).begin + 1; }

  /// RecursionChoice 0 keeps the first stage; choice k runs k stages plainly and keeps the value after them.
  RecursionChoice choice(int state, int index) const {
    const auto& [begin, last, passing, forward] = place(state);
    if (index == 0) {
      const CheckpointStage& stage = numbers_.stage(begin);
      RecursionChoice keep = {stage.forward_time + stage.backward_time, numbers_.keeping(begin, last + 1), -1, 0, -1};
      if (begin < last) {
        keep.first = ranges_.number(begin + 1, last);
        keep.held = stage.saved_bytes;
      }
      return keep;
    }
    const int middle = begin + index;
    const int before = ranges_.number(begin, middle - 1);
    return {place(before).forward, numbers_.value(last + 1) + place(before).passing, ranges_.number(middle, last),
            numbers_.value(middle), before};
  }

  int first_stage(int state) const { return place(state).begin; }

 private:
  struct Place {
    int begin;
    int last;
    Bytes passing;   // the most that plain forwards of all its stages need
    double forward;  // their time
  };

  const Place& place(int state) const { return places_[static_cast<std::size_t>(state)]; }

  const ChainNumbers& numbers_;
  StageRanges ranges_;
  std::vector<Place> places_;
};

/// State k is the last k + 1 stages. The last segment is always kept: to run it again would need as much memory.
class FlatGraph {
 public:
  explicit FlatGraph(const ChainNumbers& numbers) : numbers_(numbers), ranges_(numbers.size()) {
    const int size = numbers.size();
    segments_.resize(static_cast<std::size_t>(ranges_.count()));
    for (int begin = 0; begin < size; ++begin) {
      Segment segment;
      Bytes passing = 0;
      Bytes forward = 0;
      Bytes backward = 0;
      Bytes saved = 0;
      for (int last = begin; last < size; ++last) {
        const CheckpointStage& stage = numbers.stage(last);
        saved += stage.saved_bytes;
        passing = std::max(passing, numbers.passing(last, begin));
        forward = std::max(forward, saved + stage.forward_transient_bytes);
        backward =
            std::max(backward, saved + numbers.value(last + 1) + numbers.value(last) + stage.backward_transient_bytes);
        segment.cost += 2 * stage.forward_time + stage.backward_time;
        segment.needed = std::max({numbers.value(size) + passing, numbers.value(last + 1) + forward, backward});
        segments_[static_cast<std::size_t>(ranges_.number(begin, last))] = segment;
      }
    }
  }

  int states() const { return numbers_.size(); }
  int choices(int state) const { return state + 1; }

  /// RecursionChoice 0 keeps the first stage; choice k runs the first k stages again.
  RecursionChoice choice(int state, int index) const {
    const int begin = first_stage(state);
    if (index == 0) {
      const CheckpointStage& stage = numbers_.stage(begin);
      return {stage.forward_time + stage.backward_time, numbers_.keeping(begin, numbers_.size()), state - 1,
              stage.saved_bytes, -1};
    }
    const Segment& segment = segments_[static_cast<std::size_t>(ranges_.number(begin, begin + index - 1))];
    return {segment.cost, segment.needed, state - index, numbers_.value(begin + index), -1};
  }

  int first_stage(int state) const { return numbers_.size() - 1 - state; }

 private:
  struct Segment {
    double cost = 0;
    Bytes needed = 0;
  };

  const ChainNumbers& numbers_;
  StageRanges ranges_;
  std::vector<Segment> segments_;
};

/// The operations of a solution, in order.
class StepWriter {
 public:
  explicit StepWriter(int size) : plain_(static_cast<std::size_t>(size + 1), false) {}

  void pass(int begin, int end) {
    for (int index = begin; index < end; ++index) {
      steps_.push_back({CheckpointStep::Kind::kForward, index});
      plain_[static_cast<std::size_t>(index + 1)] = true;
      if (index > begin) {
        drop(index);
      }
    }
  }

  void save(int index) { steps_.push_back({CheckpointStep::Kind::kForwardSaving, index}); }

  void go_back(int index) {
    steps_.push_back({CheckpointStep::Kind::kBackward, index});
    drop(index);
  }

  std::vector<CheckpointStep> taken() && { return std::move(steps_); }

 private:
  /// The value, if it is kept outside of a saved set. The chain's input stays.
  void drop(int value) {
    if (plain_[static_cast<std::size_t>(value)]) {
      steps_.push_back({CheckpointStep::Kind::kDrop, value});
      plain_[static_cast<std::size_t>(value)] = false;
    }
  }

  std::vector<CheckpointStep> steps_;
  std::vector<bool> plain_;  // by value
};

void write_steps(const RecursionSearch<PersistentGraph>& search, const PersistentGraph& graph, int state, Bytes memory,
                 StepWriter& steps) {
  const RecursionChoice choice = graph.choice(state, search.best(state, memory));
  const int begin = graph.first_stage(state);
  if (choice.second < 0) {
    steps.save(begin);
  } else {
    steps.pass(begin, graph.first_stage(choice.first));
  }
  if (choice.first >= 0) {
    write_steps(search, graph, choice.first, memory - choice.held, steps);
  }
  if (choice.second < 0) {
    steps.go_back(begin);
  } else {
    write_steps(search, graph, choice.second, memory, steps);
  }
}

void write_steps(const RecursionSearch<FlatGraph>& search, const FlatGraph& graph, int state, Bytes memory,
                 StepWriter& steps) {
  const int index = search.best(state, memory);
  const RecursionChoice choice = graph.choice(state, index);
  const int begin = graph.first_stage(state);
  const int end = begin + std::max(index, 1);
  const bool kept = index == 0;
  if (kept) {
    steps.save(begin);
  } else {
    steps.pass(begin, end);
  }
  if (choice.first >= 0) {
    write_steps(search, graph, choice.first, memory - choice.held, steps);
  }
  for (int stage = begin; stage < end && !kept; ++stage) {
    steps.save(stage);
  }
  for (int stage = end; stage-- > begin;) {
    steps.go_back(stage);
  }
}

double time_of(const CheckpointChain& chain, const std::vector<CheckpointStep>& steps) {
  double time = 0;
  for (const CheckpointStep& step : steps) {
    if (step.kind != CheckpointStep::Kind::kDrop) {
      const CheckpointStage& stage = chain.stages[static_cast<std::size_t>(step.index)];
      time += step.kind == CheckpointStep::Kind::kBackward ? stage.backward_time : stage.forward_time;
    }
  }
  return time;
}

SearchEffort effort_for(double states, double choices, double effort) {
  constexpr double kTable = 3e7;    // numbers in both tables
  constexpr double kSums = 2e9;     // of which a second makes about as many
  constexpr double kChoices = 6e7;  // looked at in the search
  const double cells = std::min({kTable / (2 * states), effort * kSums / (2 * choices), 4096.0});
  return {static_cast<int>(std::max(cells, 8.0)), static_cast<std::int64_t>(effort * kChoices)};
}

template <typename Graph>
std::optional<CheckpointPlan> solve(const CheckpointChain& chain, const ChainNumbers& numbers, Bytes memory,
                                    double choices, double effort) {
  const Graph graph(numbers);
  const RecursionSearch<Graph> search(graph, memory, effort_for(graph.states(), choices, effort));
  if (!search.possible()) {
    return std::nullopt;
  }
  StepWriter steps(numbers.size());
  write_steps(search, graph, graph.states() - 1, memory, steps);
  CheckpointPlan plan;
  plan.steps = std::move(steps).taken();
  plan.time = time_of(chain, plan.steps);
  plan.bound = search.bound() < search.value() ? std::min(search.bound(), plan.time) : plan.time;
  return plan;
}

}  // namespace

std::optional<CheckpointPlan> plan_checkpoints(const CheckpointChain& chain, Bytes memory, CheckpointClass type,
                                               double effort) {
  check_checkpoints(chain, memory, type);
  const ChainNumbers numbers(chain);
  const int size = numbers.size();
  const Bytes room = memory / numbers.unit() - numbers.value(0);  // the chain's input is there all the time
  if (room < 0) {
    return std::nullopt;
  }
  const double pairs = 0.5 * size * (size + 1);
  return type == CheckpointClass::kFlat ? solve<FlatGraph>(chain, numbers, room, pairs, effort)
                                        : solve<PersistentGraph>(chain, numbers, room, pairs * (size + 2) / 3, effort);
}

}  // namespace hydra
