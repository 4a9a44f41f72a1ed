// The updates of one optimizer step, or of a part of it.
//
// A plan is made with the interpreter lock and run without it: by a pool at once, or range by range as gradients become
// ready. Only running needs the scale of the gradients.
//
// Owns its list, but not the memory it points to: the maker of a plan keeps weights, state and gradients alive and in
// place until every range was run. Running needs no lock. Each range runs once; ranges of one parameter that run at the
// same time must not overlap.
#pragma once

#include <vector>

#include "csrc/base/thread_pool.h"
#include "csrc/optim/parameter_update.h"
#include "csrc/optim/ranges.h"

namespace hydra {

class StepPlan {
 public:
  explicit StepPlan(InstructionSet instructions = best_instruction_set()) : instructions_(instructions) {}

  /// Adds an update. Throws StateError unless it has exactly the arrays that its rule and layout need.
  void add(const ParameterUpdate& update);

  std::size_t size() const noexcept { return updates_.size(); }
  const std::vector<ParameterUpdate>& updates() const noexcept { return updates_; }
  /// The number of elements of one parameter.
  std::int64_t count(std::size_t parameter) const { return updates_.at(parameter).count; }

  /// The bytes that run() reads and writes.
  std::int64_t traffic_bytes() const noexcept;

  /// Updates every parameter. If weights overlap, the updates run one after the other, in the order of add().
  void run(ThreadPool& pool, float scale) const;
  /// Updates elements begin ... end - 1 of one parameter, on the calling thread. Throws StateError if the plan has no
  /// such parameter or elements.
  void run_range(std::size_t parameter, std::int64_t begin, std::int64_t end, float scale) const;

 private:
  static constexpr std::int64_t kRangeElements = 1 << 16;

  bool overlaps() const;

  InstructionSet instructions_;
  std::vector<ParameterUpdate> updates_;
  Ranges ranges_{kRangeElements};
};

}  // namespace hydra
