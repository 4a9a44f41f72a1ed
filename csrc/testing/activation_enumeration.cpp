#include "csrc/testing/activation_enumeration.h"

#include <algorithm>
#include <limits>

namespace hydra::testing {

namespace {

/// The next of all combinations of options; false after the last.
bool advance(std::vector<ActivationOption>& options) {
  for (ActivationOption& option : options) {
    if (option != kActivationOptions.back()) {
      option = kActivationOptions[static_cast<std::size_t>(option) + 1];
      return true;
    }
    option = kActivationOptions.front();
  }
  return false;
}

bool allow(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (!allows(segments[i], treatment.options[i], treatment.round_size)) {
      return false;
    }
  }
  return true;
}

}  // namespace

double least_activation_seconds(const ActivationProblem& problem) {
  const std::vector<ActivationSegment>& segments = problem.cuts.at(0);
  const std::vector<int> sizes = problem.round_sizes.empty() ? round_sizes(problem.microbatches) : problem.round_sizes;
  double least = std::numeric_limits<double>::infinity();
  for (const int round_size : sizes) {
    for (const Bytes stash_bytes : stash_sizes(segments)) {
      std::vector<ActivationOption> options(segments.size(), kActivationOptions.front());
      do {
        const ActivationTreatment treatment = {options, round_size, stash_bytes};
        if (allow(segments, treatment) && peak_bytes(segments, treatment) <= problem.machine.budget &&
            fits_host(segments, treatment, problem.machine)) {
          least = std::min(least, simulate_step(segments, problem.machine, problem.microbatches, treatment).seconds);
        }
      } while (advance(options));
    }
  }
  return least;
}

}  // namespace hydra::testing
