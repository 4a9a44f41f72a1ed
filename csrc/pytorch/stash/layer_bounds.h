// Computes the error bound within which each layer's input may be stored, from its effect on the weight's gradient.
//
// A layer is identified by its weight. Let x' = x + e, with errors e that are independent, uniform within the bound b,
// and 0 where x is 0. Every element of G adds to `touched` elements of the weight's gradient dW = x^T G. So the error
// of dW has
//   E |ddW|^2 = b^2 / 3 * r * touched * |G|^2                       r: the share of x that is not 0
// The bound is chosen so that the root of this is `fraction` of the momentum's norm:
//   b = fraction * m * |dW| / |G| * sqrt(3 / (r * touched))
// The bound is at most sqrt(2 * fraction) times the root mean square of the elements of x that are not 0. Errors of
// numbers below the bound depend on these numbers, and have a mean that grows with the square of that ratio; with this
// limit the mean stays below `fraction`.
//
// |G|, |dW|, r and the mean square are measured in the backward of a layer's 1st, 2nd, 4th, 8th, ... forward up to the
// `every`-th, and then of one in `every`, at changing positions. In the means over samples, each new sample has half
// the weight. m is the momentum's norm over that of the gradient, as last set; 1 before. From one sample to the next, a
// bound changes by a factor of at most 2, except through that limit. (COMET, Jin et al., VLDB 2022, section 4, has the
// rule with fitted constants; this derivation needs none.)
//
// Threads: any. Nothing else is called with a mutex held.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "csrc/base/types.h"
#include "csrc/pytorch/stash/saved_use.h"

namespace hydra {

/// The figures of one layer. Norms are means over samples, each of a single backward.
struct LayerFigures {
  at::Tensor weight;
  std::int64_t forwards = 0;
  std::int64_t samples = 0;
  double bound = 0;  // 0 while it is unknown and inputs are stored exactly
  double touched = 0;
  double nonzero = 1;          // r
  double mean_square = 0;      // of the input's elements that are not 0
  double output_gradient = 0;  // |G|
  double weight_gradient = 0;  // |dW|
  double momentum = 1;         // m: the momentum's norm over that of the gradient in the last step
  Bytes saved_bytes = 0;
  Bytes stored_bytes = 0;  // the bytes that were stored for saved_bytes

  /// The predicted norm of the error of the weight's gradient, over the gradient's norm.
  double relative_error() const noexcept;
};

class LayerBounds final {
 public:
  /// `fixed`: one bound for all layers. Without it, each layer's bound follows from `fraction`.
  LayerBounds(std::optional<double> fixed, double fraction, std::int64_t every);

  struct Layer;
  using LayerPtr = std::shared_ptr<Layer>;

  /// Counts a forward of the use's layer, whose need is kBounded. Returns the layer and its bound, if that is known.
  /// May wait until the device has computed the last sample.
  std::pair<LayerPtr, std::optional<double>> enter(const SavedUse& use, const at::Tensor& saved);
  static void count(Layer& layer, Bytes saved, Bytes stored);
  /// Sets m for the layer with that weight, if there is one.
  void set_momentum(const at::Tensor& weight, double over_gradient);
  /// Returns the layers whose weights are still alive, in the order of their first forwards.
  std::vector<LayerFigures> layers() const;

 private:
  std::optional<double> update(Layer& layer);
  void take(LayerFigures& figures, double nonzero, double mean_square, double output, double weight) const;

  const std::optional<double> fixed_;
  const double fraction_;
  const std::int64_t every_;
  mutable std::mutex mutex_;  // guards layers_ and by_weight_
  std::vector<LayerPtr> layers_;
  std::unordered_map<c10::TensorImpl*, LayerPtr> by_weight_;
};

}  // namespace hydra
