#include "csrc/optim/parameter_update.h"

#include <cmath>

#include "csrc/base/float_mode.h"
#include "csrc/optim/kernels/kernels.h"

namespace hydra {

AdamStep AdamStep::make(const Options& options, std::int64_t step) {
  const auto count = static_cast<double>(step);
  const double correction1 = 1.0 - std::pow(options.beta1, count);
  const double correction2 = 1.0 - std::pow(options.beta2, count);
  AdamStep made{};
  // Without decay both rules are equal, except that this one preserves infinite weights.
  made.decoupled = options.decoupled || options.weight_decay == 0.0;
  made.decay =
      static_cast<float>(made.decoupled ? 1.0 - options.learning_rate * options.weight_decay : options.weight_decay);
  made.rise1 = static_cast<float>(1.0 - options.beta1);
  made.beta2 = static_cast<float>(options.beta2);
  made.rise2 = static_cast<float>(1.0 - options.beta2);
  made.step_size = static_cast<float>(options.learning_rate / correction1);
  made.inverse_root = static_cast<float>(1.0 / std::sqrt(correction2));
  made.epsilon = static_cast<float>(options.epsilon);
  return made;
}

SgdStep SgdStep::make(const Options& options, bool first) {
  return {
      .learning_rate = static_cast<float>(options.learning_rate),
      .weight_decay = static_cast<float>(options.weight_decay),
      .momentum = static_cast<float>(options.momentum),
      .undamped = static_cast<float>(first ? 1.0 : 1.0 - options.dampening),
      .nesterov = options.nesterov,
  };
}

std::int64_t traffic_bytes(const ParameterUpdate& update) noexcept {
  const std::int64_t weight = bytes_of(update.weight_format);
  std::int64_t each = bytes_of(update.gradient_format);
  switch (update.layout) {
    case WeightLayout::kFloat32:
      each += 2 * weight;
      break;
    case WeightLayout::kMaster:
      each += weight + 2 * bytes_of(NumberFormat::kFloat32);
      break;
    case WeightLayout::kSplit:
      each += 4 * weight;  // the lower half is as long as the upper
      break;
  }
  for (const void* moment : {update.first_moment, update.second_moment}) {
    each += moment != nullptr ? 2 * bytes_of(update.moment_format) : 0;
  }
  return each * update.count;
}

std::uint32_t rounding_seed(std::int64_t step, std::int64_t ordinal) noexcept {
  // The finaliser of splitmix64 over both numbers, so that neighbours in either have unrelated seeds.
  auto mixed = (static_cast<std::uint64_t>(step) << 32) ^ static_cast<std::uint64_t>(ordinal);
  mixed += 0x9E3779B97F4A7C15U;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
  return static_cast<std::uint32_t>(mixed ^ (mixed >> 31));
}

void run_update(const ParameterUpdate& update, std::int64_t begin, std::int64_t end, float scale,
                InstructionSet instructions) noexcept {
  const StandardFloatMode standard;
  kernels(instructions).update(update, begin, end, scale);
}

}  // namespace hydra
