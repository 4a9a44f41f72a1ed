// The update of one parameter in one step: its rule, the layout of its numbers, and the step's scalars. Plain data.
//
// The rules are in fp32. Each operation is rounded by itself, in this order (w weight, g gradient, m and v moments).
// Names with a point are members of AdamStep or SgdStep; they are computed in fp64 and rounded once.
//
//   all        g = g * scale, rounded to the gradient's format, as by gradient.mul_(scale)
//   AdamW      w = w * .decay                      Adam (L2)   g = g + w * .decay
//     both     m = m + (g - m) * .rise1
//              v = v * .beta2 + (g * .rise2) * g
//              w = w - (.step_size * m) / (sqrt(v) * .inverse_root + .epsilon)
//   SGD        g = g + w * .weight_decay, unless that is 0
//     momentum m = m * .momentum + g * .undamped,  g = m, or with Nesterov g = g + m * .momentum
//              w = w - g * .learning_rate
//
// A bf16 weight with an fp32 master is rounded half-up: to nearest, with ties away from zero. A NaN keeps its sign and
// becomes quiet. An fp16 weight is rounded to nearest even. bf16 moments are rounded stochastically: to-nearest would
// freeze the second moment, whose changes are smaller than half of its last place. The random bits are a hash of the
// element's index and `seed`.
//
// Weights can be written to other memory than they are read from: then two versions live side by side. Moments and
// master have no versions, and belong to the newer weights. The numbers are the same.
//
// No rule checks that gradients are finite: the caller has to skip a step that must not be taken.
// Memory is the caller's. Sizes are elements, unless a name says bytes.
#pragma once

#include <cstdint>
#include <variant>

#include "csrc/base/instruction_set.h"
#include "csrc/base/number_format.h"

namespace hydra {

enum class WeightLayout : std::uint8_t {
  kFloat32,  // weights: fp32; no master
  kMaster,   // weights: bf16 or fp16, written only; master: fp32
  kSplit,    // weights: bf16, the upper half of an fp32 number rounded half-up; master: int16, the rounding error of
             // the weights last written
};

struct AdamStep {
  bool decoupled;
  float decay;  // decoupled: 1 - learning rate * weight decay; else the weight decay
  float rise1;
  float beta2;
  float rise2;
  float step_size;
  float inverse_root;
  float epsilon;

  struct Options {
    double learning_rate;
    double beta1;
    double beta2;
    double epsilon;
    double weight_decay;
    bool decoupled;
  };
  /// The scalars of step number `step`, counted from 1.
  static AdamStep make(const Options& options, std::int64_t step);
};

struct SgdStep {
  float learning_rate;
  float weight_decay;
  float momentum;
  float undamped;
  bool nesterov;

  struct Options {
    double learning_rate;
    double momentum;
    double dampening;
    double weight_decay;
    bool nesterov;
  };
  /// `first` says that the momentum is still zero: it takes the gradient undamped.
  static SgdStep make(const Options& options, bool first);
};

/// Owns no memory. Each array has `count` elements, and has to stay in place until the last range was run. Arrays do
/// not overlap. Element i of each array belongs to element i of the weights.
struct ParameterUpdate {
  std::variant<AdamStep, SgdStep> step;
  std::int64_t count = 0;
  WeightLayout layout = WeightLayout::kFloat32;
  NumberFormat weight_format = NumberFormat::kFloat32;
  NumberFormat gradient_format = NumberFormat::kFloat32;
  NumberFormat moment_format = NumberFormat::kFloat32;  // fp32 or bf16
  void* weights = nullptr;
  void* new_weights = nullptr;  // null: weights are written in place; else `weights` are only read
  void* master = nullptr;
  const void* gradient = nullptr;
  void* first_moment = nullptr;   // null for SGD without momentum
  void* second_moment = nullptr;  // Adam only
  std::uint32_t seed = 0;
};

/// Returns the sum of the bytes that the update reads and those that it writes.
std::int64_t traffic_bytes(const ParameterUpdate& update) noexcept;

/// Returns the seed of a parameter's stochastic rounding in one step. `ordinal` is its position in the optimizer.
std::uint32_t rounding_seed(std::int64_t step, std::int64_t ordinal) noexcept;

/// Updates elements begin ... end - 1. The bits do not depend on the division of a parameter into ranges, nor on the
/// thread or its floating-point mode. Ranges that do not overlap may run at the same time.
void run_update(const ParameterUpdate& update, std::int64_t begin, std::int64_t end, float scale,
                InstructionSet instructions = best_instruction_set()) noexcept;

}  // namespace hydra
