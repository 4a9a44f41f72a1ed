// Which layers of a stage are recomputed: a knapsack with two ways for each layer. Exact.
//
// The fastest way of each layer is the base. Where its bytes are too many, layers take their other way, so that the
// bytes fit and the least time is added. Layers are tried by added time per saved byte. The relaxed problem, where a
// layer may be split, decides most cases. A list of undominated choices (Nemhauser and Ullmann, 1969) decides the rest.
//
// One object serves one thread: it caches the order of layers. It refers to the graph, which has to outlive it.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "csrc/plan/layer_graph.h"

namespace hydra {

class RecomputeChoice {
 public:
  enum class Answer { kYes, kNo, kUnknown };  // unknown: the list of choices became too long

  struct Choice {
    double time = 0;
    std::vector<std::size_t> recomputed;  // ascending
    bool exact = true;
  };

  /// `memory` is the bytes of a stage.
  RecomputeChoice(const LayerGraph& graph, double memory);

  /// Whether the stage fits with so many microbatches in flight, and takes at most `time`.
  Answer fits_within(double time, const LayerSet& stage, int in_flight);

  /// The fastest choice that fits; nullopt if none does. `exact` is false if a faster one may exist.
  std::optional<Choice> fastest(const LayerSet& stage, int in_flight);

 private:
  struct Item {
    std::size_t layer = 0;
    double time = 0;   // that the other way adds
    double bytes = 0;  // that it saves
  };
  struct Knapsack {
    double base_time = 0;
    double excess_bytes = 0;  // of the base, above the memory
    std::vector<Item> items;  // by time per byte
    double relaxed_time = 0;  // added at least
    double greedy_time = 0;   // added by the first items that save enough, with the best last one
    std::vector<std::size_t> greedy;
    bool possible = true;
  };

  const std::vector<Item>& items_of(int in_flight);
  Knapsack knapsack(const LayerSet& stage, int in_flight);

  const LayerGraph& graph_;
  double memory_;
  std::map<int, std::vector<Item>> items_;  // by microbatches in flight
};

}  // namespace hydra
