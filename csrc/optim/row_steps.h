// Steps of single rows of a parameter, whose other rows make them later.
//
// A row without gradient makes a step with a gradient of zero: its moments and decay change it. `made` counts the steps
// of each row. The kernels work element by element, so the bits are those of steps of the whole parameter.
//
// Weights and moments are fp32, contiguous and the caller's. Threads: one at a time for a parameter.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "csrc/base/thread_pool.h"
#include "csrc/optim/parameter_update.h"

namespace hydra {

/// A step that some rows have not made.
struct MissedStep {
  std::variant<AdamStep, SgdStep> step;
  bool rests = false;  // a row without gradient whose moments are zero does not change
};

/// Rows of a parameter. `whole` has the addresses and the formats; its step and gradient are not used.
struct Rows {
  ParameterUpdate whole;
  std::int64_t width = 0;                 // elements of a row
  std::span<const std::int64_t> numbers;  // each row once
  std::span<std::int32_t> made;           // of all rows of the parameter
};

/// Makes the steps that rows lack: `missed` are those from number `first` on. Then `made` is first + missed.size().
void catch_up(const Rows& rows, std::int64_t first, std::span<const MissedStep> missed, ThreadPool& pool);

/// Makes one step of rows that lack none, and sets their `made`. `gradient` has their rows one behind the other.
void step_rows(const Rows& rows, const std::variant<AdamStep, SgdStep>& step, const float* gradient, std::int32_t made,
               ThreadPool& pool);

}  // namespace hydra
