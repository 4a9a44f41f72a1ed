#include "csrc/pytorch/stash/wishes.h"

#include <algorithm>
#include <utility>

#include "csrc/pytorch/memory/number_format.h"

namespace hydra {

namespace {

// The bound if only signs or shapes matter: a power of two of which every format has multiples.
constexpr double kAnything = 0x1p14;

}  // namespace

Wishes Wishes::of(const at::Tensor& saved, LayerBounds& bounds) {
  const SavedUse use = use_of(saved);
  Wishes wishes;
  wishes.dtype = saved.scalar_type();
  wishes.pool = use.pool;
  wishes.encodable = use.need == Need::kIndices || (use.need != Need::kExact && number_format(wishes.dtype));
  wishes.keep_signs = use.need == Need::kSigns;
  wishes.exact_for = wishes.encodable ? "" : use.op;
  if (wishes.encodable && use.need == Need::kBounded) {
    auto [layer, bound] = bounds.enter(use, saved);
    wishes.layers.push_back(std::move(layer));
    wishes.bound = bound.value_or(0.0);
    if (!bound) {
      wishes.encodable = false;
      wishes.exact_for = std::string(use.op) + ", not yet measured";
    }
  }
  return wishes;
}

void Wishes::add(const Wishes& others) {
  if (encodable && (!others.encodable || others.dtype != dtype || others.pool != pool)) {
    encodable = false;
    exact_for = others.exact_for;
  }
  keep_signs |= others.keep_signs;
  bound = std::min(bound, others.bound);
  layers.insert(layers.end(), others.layers.begin(), others.layers.end());
}

bool Wishes::grant(const Wishes& others) const {
  if (!encodable) {
    return true;
  }
  return others.encodable && others.dtype == dtype && others.pool == pool && (keep_signs || !others.keep_signs) &&
         bound <= others.bound;
}

void Wishes::count(Bytes saved, Bytes stored) const {
  for (const LayerBounds::LayerPtr& layer : layers) {
    LayerBounds::count(*layer, saved, stored);
  }
}

CoderPtr Wishes::coder(c10::Device device, Bytes bytes) const {
  if (!encodable) {
    return nullptr;
  }
  const auto itemsize = static_cast<Bytes>(c10::elementSize(dtype));
  if (pool) {
    // Only if the indices are the whole interval is its order that of the geometry.
    return pool->count() * itemsize == bytes ? make_window_coder(device, *pool) : nullptr;
  }
  const std::optional<NumberFormat> format = number_format(dtype);
  if (!format || bytes % itemsize != 0) {
    return nullptr;
  }
  return make_bounded_coder(device, *format, bytes / itemsize, std::min(bound, kAnything), keep_signs);
}

}  // namespace hydra
