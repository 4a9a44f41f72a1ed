// Finds the fastest schedule of a chain's forward and backward that stays within a memory: which stages keep what they
// save for backward, and which run forward again.
//
// Stage i of n takes x[i] and gives x[i + 1]; its gradient has the size of the value. Memory holds values x, sets s of
// what a stage saves, which have the stage's output in them, and the present gradient. At first it holds x[0] and the
// gradient of x[n]. An operation is possible if what is held, its new output and its transient bytes fit:
//
//   forward         from the stage's input, as x or inside the previous s; adds x[i + 1]
//   forward saving  likewise; adds s
//   backward        from s, the gradient of the output, and the stage's input; adds the input's gradient, then frees s
//                   and the output's gradient
//   drop            frees a value x
//
// Two classes of schedules, both from the literature:
//
//   persistent  what is kept stays until its backward (Beaumont et al., "Optimal checkpointing for heterogeneous
//               chains", 2019). Stages s to t either run s saving, then solve the rest; or run s to j - 1 plainly,
//               solve j to t from the kept x[j], then solve s to j - 1 from x[s].
//   flat        the chain is cut into segments; each is kept, or is run again once, as a whole, from its input (Chen et
//               al., "Training deep nets with sublinear memory cost", 2016).
//
// Exact for whole bytes, unless the chain is so large that the search ends early; then `bound` says how far off the
// plan may be. Reentrant, without state, without clocks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/base/types.h"

namespace hydra {

struct CheckpointStage {
  double forward_time = 0;
  double backward_time = 0;
  Bytes output_bytes = 0;
  Bytes saved_bytes = 0;  // with the output
  Bytes forward_transient_bytes = 0;
  Bytes backward_transient_bytes = 0;
};

struct CheckpointChain {
  Bytes input_bytes = 0;
  std::vector<CheckpointStage> stages;
};

enum class CheckpointClass { kPersistent, kFlat };

struct CheckpointStep {
  enum class Kind { kForward, kForwardSaving, kBackward, kDrop };
  Kind kind = Kind::kForward;
  int index = 0;  // a stage; of kDrop a value: x[0] is the chain's input, x[i + 1] the output of stage i

  bool operator==(const CheckpointStep&) const = default;
};

struct CheckpointPlan {
  double time = 0;   // of all forwards and backwards
  double bound = 0;  // no schedule of the class is faster; equal to `time` if the plan is optimal
  std::vector<CheckpointStep> steps;
};

/// `effort` bounds counts, not a clock: with 1, chains of 200 to 400 stages take about 5 seconds, of 1000 about 25.
/// Returns nullopt if no schedule of the class fits. Throws PlanError for an empty chain, numbers that are negative or
/// not finite, and chains of more than 1000 stages (flat: 4000).
std::optional<CheckpointPlan> plan_checkpoints(const CheckpointChain& chain, Bytes memory, CheckpointClass type,
                                               double effort = 1.0);

}  // namespace hydra
