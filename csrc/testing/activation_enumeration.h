// All treatments of a small chain of segments, one after another: the measure of the planner of activations.
#pragma once

#include "csrc/plan/activation_plan.h"

namespace hydra::testing {

/// The least seconds over all options, sizes of rounds and of the stash, for the first cut of a problem; infinity if
/// nothing fits. Takes at most 5^segments simulated steps for each pair of sizes.
double least_activation_seconds(const ActivationProblem& problem);

}  // namespace hydra::testing
