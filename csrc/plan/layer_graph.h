// A model as a graph of layers, which a planner cuts into stages that are sets of layers.
//
//   layer      a node; its inputs are the layers that an edge comes from
//   downset    a set of layers that has all inputs of each of its layers
//   stage      the layers of one downset that a smaller one lacks; the downsets of a plan form a chain
//   kept       a layer's activations are kept from its forward to its backward
//   recomputed its forward is run again before its backward, which takes longer and keeps fewer bytes
//
// A layer that is kept or recomputed takes `time` for one microbatch, and `bytes_per_microbatch * in flight +
// fixed_bytes`. The unit of time is the caller's.
//
// Plain values, reentrant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace hydra {

struct LayerCost {
  double time = 0;
  double bytes_per_microbatch = 0;
  double fixed_bytes = 0;

  double bytes(double in_flight) const noexcept { return bytes_per_microbatch * in_flight + fixed_bytes; }
};

struct Layer {
  LayerCost kept;
  LayerCost recomputed;
  double parameter_bytes = 0;

  const LayerCost& faster() const noexcept { return recomputed.time < kept.time ? recomputed : kept; }
  const LayerCost& slower() const noexcept { return recomputed.time < kept.time ? kept : recomputed; }
};

struct LayerEdge {
  std::size_t from = 0;
  std::size_t to = 0;
  double bytes = 0;  // of the value that crosses, for one microbatch
};

struct LayerGraph {
  std::vector<Layer> layers;
  std::vector<LayerEdge> edges;
};

/// A set of layers: one bit for each.
class LayerSet {
 public:
  explicit LayerSet(std::size_t layers) : words_((layers + 63) / 64, 0) {}

  bool has(std::size_t layer) const noexcept { return (words_[layer / 64] >> (layer % 64) & 1) != 0; }
  void add(std::size_t layer) noexcept { words_[layer / 64] |= std::uint64_t{1} << (layer % 64); }
  void remove(std::size_t layer) noexcept { words_[layer / 64] &= ~(std::uint64_t{1} << (layer % 64)); }
  bool within(const LayerSet& larger) const noexcept;
  LayerSet without(const LayerSet& other) const;
  std::size_t size() const noexcept;
  std::vector<std::size_t> layers() const;  // ascending

  friend bool operator==(const LayerSet&, const LayerSet&) = default;
  friend auto operator<=>(const LayerSet&, const LayerSet&) = default;

 private:
  friend struct std::hash<LayerSet>;
  std::vector<std::uint64_t> words_;
};

/// Which layer comes before which, and the downsets that follow from it.
class Precedence {
 public:
  /// Throws PlanError if the edges form a cycle, or name layers that are not there.
  explicit Precedence(const LayerGraph& graph);

  std::size_t layers() const noexcept { return inputs_.size(); }

  /// All layers, inputs first: of those whose inputs are placed, the newest next, or the oldest.
  std::vector<std::size_t> depth_first() const { return order(true); }
  std::vector<std::size_t> breadth_first() const { return order(false); }

  /// All downsets, or nullopt if there are more than `limit`. Takes O(limit * (layers + edges)).
  std::optional<std::vector<LayerSet>> downsets(std::size_t limit) const;

  /// Up to `limit` downsets near `from`: first those that differ in one layer, then in two, and so on.
  std::vector<LayerSet> neighbours(const LayerSet& from, std::size_t limit) const;

 private:
  std::vector<std::size_t> order(bool newest_first) const;
  /// Downsets with one layer more, and with one layer less.
  void append_larger(const LayerSet& set, std::vector<LayerSet>* found) const;
  void append_smaller(const LayerSet& set, std::vector<LayerSet>* found) const;

  std::vector<std::vector<std::size_t>> inputs_;
  std::vector<std::vector<std::size_t>> users_;
};

}  // namespace hydra

template <>
struct std::hash<hydra::LayerSet> {
  std::size_t operator()(const hydra::LayerSet& set) const noexcept;
};
