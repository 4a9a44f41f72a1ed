// The storage needs of a tensor: the strictest of those of all operators that save it.
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
  /// The needs of the operator that saves this tensor now.
  static Wishes of(const at::Tensor& saved, LayerBounds& bounds);

  bool encodable = false;
  bool keep_signs = false;
  double bound = std::numeric_limits<double>::infinity();
  std::optional<codec::PoolGeometry> pool;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<LayerBounds::LayerPtr> layers;
  std::string exact_for;  // the operator that needs exact bytes, or another reason for them

  /// Adds the needs of another operator.
  void add(const Wishes& others);
  /// Whether bytes stored for these needs also meet the others.
  bool grant(const Wishes& others) const;
  /// Counts the bytes that were stored for the layers whose input this is.
  void count(Bytes saved, Bytes stored) const;
  /// Returns null if the bytes are stored as they are.
  CoderPtr coder(c10::Device device, Bytes bytes) const;
};

}  // namespace hydra
