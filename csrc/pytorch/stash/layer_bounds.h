// Within what bound each layer's input may be stored, and what that does to its weight's gradient.
//
// A layer is known by its weight. With x' = x + e and errors e that are independent, uniform within the bound b, and
// none where x is 0, the error of the weight's gradient dW = x^T G has, as every element of G adds to `touched` of
// them,
//   E |ddW|^2 = b^2 / 3 * r * touched * |G|^2                       r: the share of x that is not 0
// The bound is therefore chosen so that this is `fraction` of the momentum's norm:
//   b = fraction * m * |dW| / |G| * sqrt(3 / (r * touched))
// It is never more than sqrt(2 * fraction) times the root of the mean square of what is not 0 in x: errors of numbers
// that are not larger than the bound are not independent of them, and their mean, which grows with the square of that
// ratio, stays below `fraction` so.
// |G|, |dW|, r and the mean square are measured in the backward of a layer's 1st, 2nd, 4th, 8th, ... forward up to the
// `every`-th, and of one in `every` from then on, in changing places. Means over the samples forget half with each one.
// m, the momentum's norm over that of the gradient, is as it was told last, 1 until it is. But for that limit a bound
// never grows or falls by more than a factor of 2 from one sample to the next. (COMET, Jin et al., VLDB 2022, section
// 4, has the rule with constants that were fitted; this derivation needs none.)
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

/// Of one layer. Norms are those of a single backward.
struct LayerFigures {
  at::Tensor weight;
  std::int64_t forwards = 0;
  std::int64_t samples = 0;
  double bound = 0;  // 0 while it is not known, and nothing is stored inexactly
  double touched = 0;
  double nonzero = 1;
  double mean_square = 0;  // of what is not 0 in the input
  double output_gradient = 0;
  double weight_gradient = 0;
  double momentum = 1;  // that of the last step, its norm over that of the gradient then at hand
  Bytes saved_bytes = 0;
  Bytes stored_bytes = 0;  // that they have become

  /// The norm of the weight gradient's error, as foretold, over that of the weight's gradient.
  double relative_error() const noexcept;
};

class LayerBounds final {
 public:
  /// One bound for all layers, or none: then it follows from `fraction`.
  LayerBounds(std::optional<double> fixed, double fraction, std::int64_t every);

  struct Layer;
  using LayerPtr = std::shared_ptr<Layer>;

  /// That of the use, which is kBounded, for one more forward. May wait for the last sample to be computed.
  std::pair<LayerPtr, std::optional<double>> enter(const SavedUse& use, const at::Tensor& saved);
  static void count(Layer& layer, Bytes saved, Bytes stored);
  /// Of the layer with that weight, if it is known.
  void set_momentum(const at::Tensor& weight, double over_gradient);
  /// In the order in which they were met; of weights that are still there.
  std::vector<LayerFigures> layers() const;

 private:
  std::optional<double> update(Layer& layer);
  void take(LayerFigures& figures, double nonzero, double mean_square, double output, double weight) const;

  const std::optional<double> fixed_;
  const double fraction_;
  const std::int64_t every_;
  mutable std::mutex mutex_;  // of the two below
  std::vector<LayerPtr> layers_;
  std::unordered_map<c10::TensorImpl*, LayerPtr> by_weight_;
};

}  // namespace hydra
