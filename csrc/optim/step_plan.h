// The updates of one optimizer step, or of a part of it: made with the interpreter's lock, run without it, all at once
// by a pool or range by range as gradients become ready, with a scale that need not be known before.
//
// Owns its list and none of the memory the list points to: the maker of a plan keeps weights, state and gradients
// alive and in place until every range was run. Running needs no lock; ranges of one parameter that overlap must not
// run twice, nor at the same time.
#pragma once

#include <vector>

#include "csrc/base/thread_pool.h"
#include "csrc/optim/parameter_update.h"
#include "csrc/optim/ranges.h"

namespace hydra {

class StepPlan {
 public:
  explicit StepPlan(InstructionSet instructions = best_instruction_set()) : instructions_(instructions) {}

  /// Throws StateError unless every array that rule and layout need is there, and no other.
  void add(const ParameterUpdate& update);

  std::size_t size() const noexcept { return updates_.size(); }
  const std::vector<ParameterUpdate>& updates() const noexcept { return updates_; }
  /// Elements of one parameter.
  std::int64_t count(std::size_t parameter) const { return updates_.at(parameter).count; }

  /// Bytes of memory that running it reads and writes.
  std::int64_t traffic_bytes() const noexcept;

  /// Every parameter whole. Where weights overlap, one after the other in the order they were added.
  void run(ThreadPool& pool, float scale) const;
  /// Elements begin ... end - 1 of one parameter, by the calling thread. Throws StateError if there are none such.
  void run_range(std::size_t parameter, std::int64_t begin, std::int64_t end, float scale) const;

 private:
  static constexpr std::int64_t kRangeElements = 1 << 16;

  bool overlaps() const;

  InstructionSet instructions_;
  std::vector<ParameterUpdate> updates_;
  Ranges ranges_{kRangeElements};
};

}  // namespace hydra
