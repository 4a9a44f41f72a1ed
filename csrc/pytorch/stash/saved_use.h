// Tells how exactly an operator's backward needs a tensor that the operator saves.
//
// While a thread follows operators, use_of() answers for the operator that is saving on it. Some backwards need only
// shapes (pools), or only signs (a ReLU's output is its mask). The input of a convolution or linear layer is needed
// only for the weight's gradient. If the weight depends on one torch.nn.Parameter alone, an error in the input reaches
// only that parameter's gradient. All others (custom functions, compiled regions, operators not named here) need exact
// tensors.
//
// torch's RecordFunction reports the operators; this costs about 0.2 us for each.
// Threads: each thread follows its own operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string_view>

#include "csrc/codec/window_codes.h"

namespace hydra {

enum class Need : std::uint8_t { kShape, kSigns, kBounded, kIndices, kExact };

struct SavedUse {
  Need need = Need::kExact;
  std::string_view op;            // the operator's name without its overload; valid while the operator runs
  bool into_convolution = false;  // whether the tensor is the input of a convolution
  // If the need is kBounded:
  at::Tensor weight{};  // the parameter that the weight is, or is a view, copy or cast of
  double touched = 0;   // elements of the weight's gradient that one of the output's gradient adds to, ignoring edges
  // If the need is kIndices: the geometry of the pool, which also describes the tensor's layout in memory.
  std::optional<codec::PoolGeometry> pool{};
};

/// Follows the operators of this thread until the matching end. Pairs nest.
void begin_following_operators();
void end_following_operators() noexcept;

/// Returns the use of a tensor that the running operator saves now.
SavedUse use_of(const at::Tensor& saved);

/// Called with the gradients of a weight, and of the output that was computed with it.
using GradientObserver = std::function<void(const at::Tensor& weight, const at::Tensor& output)>;

/// Calls the observer once, in the backward of the running operator. use_of() must have returned kBounded for its
/// input.
void observe_gradients(GradientObserver observer);

}  // namespace hydra
