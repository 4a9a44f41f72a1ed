// What one step does to one parameter: which rule, how the numbers lie in memory, and the step's scalars. Plain data.
//
// The rules, in fp32, each operation rounded by itself and in this order (w weight, g gradient, m and v moments;
// names with a point are members of AdamStep or SgdStep, worked out in fp64 and rounded once):
//
//   all        g = g * scale, rounded to the gradient's format: what gradient.mul_(scale) would have left
//   AdamW      w = w * .decay                      Adam (L2)   g = g + w * .decay
//     both     m = m + (g - m) * .rise1
//              v = v * .beta2 + (g * .rise2) * g
//              w = w - (.step_size * m) / (sqrt(v) * .inverse_root + .epsilon)
//   SGD        g = g + w * .weight_decay
//     momentum m = m * .momentum + g * .undamped,  g = m, or with Nesterov g = g + m * .momentum
//              w = w - g * .learning_rate
//
// Where a bf16 weight stands for an fp32 one it is rounded half-up, that is to nearest with ties away from zero, and a
// NaN keeps its sign and becomes quiet. An fp16 weight is rounded to nearest even. bf16 moments are rounded
// stochastically: nearest would freeze the second one, whose steps are smaller than half of its last place. The random
// bits are a hash of the element's index and `seed`.
//
// Weights can be written elsewhere than they are read: two versions of them then live side by side, and what belongs to
// weights and is no version of its own, moments and master, goes on with the newer one. The numbers are the same.
//
// Whether a gradient is finite is not looked at: a step that must not be taken is the caller's to leave out.
#pragma once

#include <cstdint>
#include <variant>

#include "csrc/base/instruction_set.h"
#include "csrc/base/number_format.h"

namespace hydra {

enum class WeightLayout : std::uint8_t {
  kFloat32,  // weights: fp32; no master
  kMaster,   // weights: bf16 or fp16, written only; master: fp32
  kSplit,    // weights: bf16, the upper half of an fp32 number rounded half-up; master: int16, what was rounded off
             // of the weights last written
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
  /// `first`: the momentum is still zero and takes the gradient undamped.
  static SgdStep make(const Options& options, bool first);
};

/// Owns nothing. The memory it points to has to stay where it is, `count` elements in each array, until the last
/// range was run; arrays do not overlap, and element i of each belongs to element i of the weights.
struct ParameterUpdate {
  std::variant<AdamStep, SgdStep> step;
  std::int64_t count = 0;
  WeightLayout layout = WeightLayout::kFloat32;
  NumberFormat weight_format = NumberFormat::kFloat32;
  NumberFormat gradient_format = NumberFormat::kFloat32;
  NumberFormat moment_format = NumberFormat::kFloat32;  // fp32 or bf16
  void* weights = nullptr;
  void* new_weights = nullptr;  // null: written in place; else `weights` are only read
  void* master = nullptr;
  const void* gradient = nullptr;
  void* first_moment = nullptr;   // none: SGD without momentum
  void* second_moment = nullptr;  // Adam only
  std::uint32_t seed = 0;
};

/// Bytes of memory that the update reads, and bytes that it writes, together.
std::int64_t traffic_bytes(const ParameterUpdate& update) noexcept;

/// The seed of a parameter's stochastic rounding in one step; `ordinal` is the parameter's place in its optimizer.
std::uint32_t rounding_seed(std::int64_t step, std::int64_t ordinal) noexcept;

/// Updates elements begin ... end - 1. Any division of a parameter into ranges gives the same bits, so does any
/// thread, whatever its floating-point mode. Ranges that do not overlap may run at the same time.
void run_update(const ParameterUpdate& update, std::int64_t begin, std::int64_t end, float scale,
                InstructionSet instructions = best_instruction_set()) noexcept;

}  // namespace hydra
