// The strictest storage that all savers of a tensor accept.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "csrc/pytorch/stash/coder.h"
#include "csrc/pytorch/stash/layer_bounds.h"
#include "csrc/pytorch/stash/saved_use.h"

namespace hydra {

struct Wishes {
  static Wishes exact() { return {}; }
  /// Of a tensor that is being saved.
  static Wishes of(const at::Tensor& saved, LayerBounds& bounds);

  bool encodable = false;
  bool keep_signs = false;
  double bound = std::numeric_limits<double>::infinity();
  std::optional<codec::PoolGeometry> pool;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<LayerBounds::LayerPtr> layers;
  std::string exact_for;  // the operator

  void add(const Wishes& others);
  /// Whether something stored as wished here has what the others wish.
  bool grant(const Wishes& others) const;
  /// What was stored for the layers that take it in.
  void count(Bytes saved, Bytes stored) const;
  /// Null if it is to be stored as it is.
  CoderPtr coder(c10::Device device, Bytes bytes) const;
};

}  // namespace hydra
