// Sums over the layers of many downsets, from which the costs of a stage between any two of them follow at once.
//
// Plain values after construction; any thread may read them. Refers to no graph.
#pragma once

#include <cstddef>
#include <vector>

#include "csrc/plan/layer_graph.h"

namespace hydra {

/// Over the layers of a downset, or of a stage.
struct LayerSums {
  double fastest_time = 0;  // of each layer's faster way
  double parameter_bytes = 0;
  double bytes_per_microbatch = 0;  // of the faster ways
  double fixed_bytes = 0;
  double least_bytes = 0;          // with one microbatch in flight, whatever is recomputed
  double least_further_bytes = 0;  // with each further one

  LayerSums operator-(const LayerSums& other) const noexcept;
  double fastest_bytes(int in_flight) const noexcept { return bytes_per_microbatch * in_flight + fixed_bytes; }
  /// No choice of recomputed layers takes less.
  double bytes_at_least(int in_flight) const noexcept { return least_bytes + least_further_bytes * (in_flight - 1); }
};

class DownsetTable {
 public:
  /// Equal downsets are dropped.
  DownsetTable(const LayerGraph& graph, std::vector<LayerSet> downsets);

  /// Downsets come by number of layers: subsets before supersets.
  std::size_t size() const noexcept { return sets_.size(); }
  const LayerSet& set(std::size_t index) const noexcept { return sets_[index]; }
  const LayerSums& sums(std::size_t index) const noexcept { return sums_[index]; }
  /// The first downset with as many layers.
  std::size_t first_of_size(std::size_t index) const noexcept { return first_of_size_[index]; }
  /// Bytes of the edges with one end in the layers that `larger` has and `smaller`, a subset, lacks.
  double crossing_bytes(std::size_t smaller, std::size_t larger) const noexcept;

 private:
  struct Leaving {
    std::size_t to = 0;
    double bytes = 0;
  };

  void append(const LayerGraph& graph, const LayerSet& set);

  std::vector<LayerSet> sets_;
  std::vector<std::size_t> first_of_size_;
  std::vector<LayerSums> sums_;
  std::vector<double> leaving_bytes_;
  std::vector<std::vector<Leaving>> leaving_;  // edges out of each downset
};

}  // namespace hydra
