#include "csrc/pytorch/stash/layer_bounds.h"

#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <utility>

#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

constexpr double kMostChange = 2.0;
constexpr double kForgotten = 0.5;

bool is_measured(std::int64_t forward, std::int64_t every) {
  if (forward < every) {
    return std::has_single_bit(static_cast<std::uint64_t>(forward + 1));
  }
  // The position within each `every` forwards changes: for a layer that is called several times a step, a fixed one
  // could always select the same call. Multiples of the golden ratio come near every position, for any number of calls.
  const double turns = static_cast<double>(forward / every) * std::numbers::phi;
  return forward % every == static_cast<std::int64_t>((turns - std::floor(turns)) * static_cast<double>(every));
}

at::Tensor norm_of(const at::Tensor& tensor) {
  return at::linalg_vector_norm(tensor, 2, {}, /*keepdim=*/false, at::kFloat);
}

}  // namespace

struct LayerBounds::Layer {
  /// The measurements of one forward and its backward, which the device may still be computing.
  struct Sample {
    at::Tensor nonzero;
    at::Tensor input;
    at::Tensor output_gradient;
    at::Tensor weight_gradient;
    std::int64_t count = 0;
  };

  mutable std::mutex mutex;
  LayerFigures figures;  // without the weight
  c10::weak_intrusive_ptr<c10::TensorImpl> weight{c10::intrusive_ptr<c10::TensorImpl>()};
  std::vector<Sample> fresh;
};

double LayerFigures::relative_error() const noexcept {
  if (weight_gradient <= 0) {
    return 0;
  }
  return bound * std::sqrt(nonzero * touched / 3.0) * output_gradient / weight_gradient;
}

LayerBounds::LayerBounds(std::optional<double> fixed, double fraction, std::int64_t every)
    : fixed_(fixed), fraction_(fraction), every_(every) {}

std::pair<LayerBounds::LayerPtr, std::optional<double>> LayerBounds::enter(const SavedUse& use,
                                                                           const at::Tensor& saved) {
  LayerPtr layer;
  {
    const std::lock_guard lock(mutex_);
    const auto found = by_weight_.find(use.weight.unsafeGetTensorImpl());
    if (found != by_weight_.end() && !found->second->weight.expired()) {  // another weight may have the address now
      layer = found->second;
    } else {
      std::erase_if(layers_, [](const LayerPtr& other) { return other->weight.expired(); });
      std::erase_if(by_weight_, [](const auto& entry) { return entry.second->weight.expired(); });
      layer = std::make_shared<Layer>();
      layer->weight = c10::weak_intrusive_ptr<c10::TensorImpl>(use.weight.getIntrusivePtr());
      layers_.push_back(layer);
      by_weight_[use.weight.unsafeGetTensorImpl()] = layer;
    }
  }
  const std::optional<double> bound = update(*layer);
  bool samples = false;
  {
    const std::lock_guard lock(layer->mutex);
    layer->figures.touched = use.touched;
    samples = is_measured(layer->figures.forwards++, every_);
  }
  if (samples) {
    const c10::AutoGradMode without(false);
    Layer::Sample begun{at::count_nonzero(saved), norm_of(saved), {}, {}, saved.numel()};
    observe_gradients([layer, begun](const at::Tensor& weight, const at::Tensor& output) {
      const c10::AutoGradMode no_graph(false);
      Layer::Sample sample = begun;
      sample.output_gradient = norm_of(output);
      sample.weight_gradient = norm_of(weight);
      const std::lock_guard lock(layer->mutex);
      layer->fresh.push_back(std::move(sample));
    });
  }
  return {layer, bound};
}

std::optional<double> LayerBounds::update(Layer& layer) {
  std::vector<Layer::Sample> fresh;
  {
    const std::lock_guard lock(layer.mutex);
    fresh.swap(layer.fresh);
  }
  for (const Layer::Sample& sample : fresh) {
    double nonzero = 0;
    double input = 0;
    double output = 0;
    double weight = 0;
    {
      const ReleaseGilIfHeld released;  // this may wait for the device
      nonzero = sample.nonzero.item<double>();
      input = sample.input.item<double>();
      output = sample.output_gradient.item<double>();
      weight = sample.weight_gradient.item<double>();
    }
    // A norm that overflowed, or a gradient of zeros, says nothing about the bound.
    if (std::isfinite(input) && std::isfinite(output) && std::isfinite(weight) && nonzero > 0 && output > 0) {
      const std::lock_guard lock(layer.mutex);
      take(layer.figures, nonzero / static_cast<double>(sample.count), input * input / nonzero, output, weight);
    }
  }
  const std::lock_guard lock(layer.mutex);
  layer.figures.bound = fixed_.value_or(layer.figures.bound);
  return layer.figures.bound > 0 ? std::optional(layer.figures.bound) : std::nullopt;
}

void LayerBounds::take(LayerFigures& figures, double nonzero, double mean_square, double output, double weight) const {
  const double old = figures.samples++ == 0 ? 0.0 : kForgotten;
  const auto follow = [old](double& mean, double sample) { mean = old * mean + (1 - old) * sample; };
  follow(figures.nonzero, nonzero);
  follow(figures.mean_square, mean_square);
  follow(figures.output_gradient, output);
  follow(figures.weight_gradient, weight);
  double wanted = fraction_ * figures.momentum * figures.weight_gradient / figures.output_gradient *
                  std::sqrt(3.0 / (figures.nonzero * figures.touched));
  if (figures.bound > 0) {
    wanted = std::clamp(wanted, figures.bound / kMostChange, figures.bound * kMostChange);
  }
  figures.bound = std::min(wanted, std::sqrt(2.0 * fraction_ * figures.mean_square));
}

void LayerBounds::count(Layer& layer, Bytes saved, Bytes stored) {
  const std::lock_guard lock(layer.mutex);
  layer.figures.saved_bytes += saved;
  layer.figures.stored_bytes += stored;
}

void LayerBounds::set_momentum(const at::Tensor& weight, double over_gradient) {
  const std::lock_guard lock(mutex_);
  const auto found = by_weight_.find(weight.unsafeGetTensorImpl());
  if (found != by_weight_.end() && !found->second->weight.expired()) {
    const std::lock_guard locked(found->second->mutex);
    found->second->figures.momentum = over_gradient;
  }
}

std::vector<LayerFigures> LayerBounds::layers() const {
  const std::lock_guard lock(mutex_);
  std::vector<LayerFigures> found;
  for (const LayerPtr& layer : layers_) {
    auto weight = layer->weight.lock();
    if (weight) {
      const std::lock_guard locked(layer->mutex);
      found.push_back(layer->figures);
      found.back().weight = at::Tensor(std::move(weight));
    }
  }
  return found;
}

}  // namespace hydra
