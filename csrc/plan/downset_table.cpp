#include "csrc/plan/downset_table.h"

#include <algorithm>
#include <utility>

namespace hydra {

LayerSums LayerSums::operator-(const LayerSums& other) const noexcept {
  return {fastest_time - other.fastest_time,
          parameter_bytes - other.parameter_bytes,
          bytes_per_microbatch - other.bytes_per_microbatch,
          fixed_bytes - other.fixed_bytes,
          least_bytes - other.least_bytes,
          least_further_bytes - other.least_further_bytes};
}

DownsetTable::DownsetTable(const LayerGraph& graph, std::vector<LayerSet> downsets) : sets_(std::move(downsets)) {
  std::sort(sets_.begin(), sets_.end(),
            [](const LayerSet& a, const LayerSet& b) { return a.size() != b.size() ? a.size() < b.size() : a < b; });
  sets_.erase(std::unique(sets_.begin(), sets_.end()), sets_.end());
  for (std::size_t i = 0; i < sets_.size(); ++i) {
    const bool same = i > 0 && sets_[i].size() == sets_[i - 1].size();
    first_of_size_.push_back(same ? first_of_size_.back() : i);
    append(graph, sets_[i]);
  }
}

void DownsetTable::append(const LayerGraph& graph, const LayerSet& set) {
  LayerSums sums;
  for (const std::size_t i : set.layers()) {
    const Layer& layer = graph.layers[i];
    const LayerCost& fast = layer.faster();
    sums.fastest_time += fast.time;
    sums.parameter_bytes += layer.parameter_bytes;
    sums.bytes_per_microbatch += fast.bytes_per_microbatch;
    sums.fixed_bytes += fast.fixed_bytes;
    sums.least_bytes += std::min(layer.kept.bytes(1), layer.recomputed.bytes(1));
    sums.least_further_bytes += std::min(layer.kept.bytes_per_microbatch, layer.recomputed.bytes_per_microbatch);
  }
  double bytes = 0;
  std::vector<Leaving> leaving;
  for (const LayerEdge& edge : graph.edges) {
    if (set.has(edge.from) && !set.has(edge.to)) {
      bytes += edge.bytes;
      leaving.push_back({edge.to, edge.bytes});
    }
  }
  sums_.push_back(sums);
  leaving_bytes_.push_back(bytes);
  leaving_.push_back(std::move(leaving));
}

double DownsetTable::crossing_bytes(std::size_t smaller, std::size_t larger) const noexcept {
  double bytes = leaving_bytes_[smaller] + leaving_bytes_[larger];
  for (const Leaving& edge : leaving_[smaller]) {
    if (!sets_[larger].has(edge.to)) {
      bytes -= 2 * edge.bytes;  // it passes by
    }
  }
  return bytes;
}

}  // namespace hydra
