// What an operator needs in backward of a tensor that it saves: whether an inexact one would do.
//
// While a thread follows operators, this answers for the one that is saving there: some look at shapes alone (pools),
// or at signs alone (a ReLU's output is its mask). A convolution's or a linear layer's input takes part in nothing but
// the weight's gradient, where the weight is a function of one torch.nn.Parameter alone: an error in it stays there.
// Everything else (custom functions, compiled regions, operators not named here), needs what it
// saved exactly.
//
// Operators are followed by torch's RecordFunction, which takes about 0.2 us for each. Threads: each for itself.
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
  std::string_view op;            // the operator, without its overload; as long as it runs
  bool into_convolution = false;  // it is the input of one
  // Where the need is kBounded:
  at::Tensor weight{};  // the parameter that the weight is, or is a view, copy or cast of
  double touched = 0;   // elements of the weight's gradient that one of the output's gradient adds to, without edges
  // Where it is kIndices: the tensor is a pool's, and lies in memory as the geometry says.
  std::optional<codec::PoolGeometry> pool{};
};

/// On this thread, until the matching end; they nest.
void begin_following_operators();
void end_following_operators() noexcept;

/// Of a tensor that is being saved.
SavedUse use_of(const at::Tensor& saved);

/// Gradients of a weight, and of the output that it took part in.
using GradientObserver = std::function<void(const at::Tensor& weight, const at::Tensor& output)>;

/// Lets the observer see them in the backward of the operator that is saving, for whose input use_of() said kBounded.
void observe_gradients(GradientObserver observer);

}  // namespace hydra
