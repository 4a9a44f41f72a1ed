#include "csrc/plan/layer_graph.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <string>
#include <unordered_set>
#include <utility>

#include "csrc/plan/chain.h"

namespace hydra {

bool LayerSet::within(const LayerSet& larger) const noexcept {
  for (std::size_t i = 0; i < words_.size(); ++i) {
    if ((words_[i] & ~larger.words_[i]) != 0) {
      return false;
    }
  }
  return true;
}

LayerSet LayerSet::without(const LayerSet& other) const {
  LayerSet rest = *this;
  for (std::size_t i = 0; i < words_.size(); ++i) {
    rest.words_[i] &= ~other.words_[i];
  }
  return rest;
}

std::size_t LayerSet::size() const noexcept {
  std::size_t found = 0;
  for (const std::uint64_t word : words_) {
    found += static_cast<std::size_t>(std::popcount(word));
  }
  return found;
}

std::vector<std::size_t> LayerSet::layers() const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < words_.size(); ++i) {
    for (std::uint64_t word = words_[i]; word != 0; word &= word - 1) {
      found.push_back(64 * i + static_cast<std::size_t>(std::countr_zero(word)));
    }
  }
  return found;
}

Precedence::Precedence(const LayerGraph& graph) : inputs_(graph.layers.size()), users_(graph.layers.size()) {
  for (const LayerEdge& edge : graph.edges) {
    HYDRA_EXPECT(edge.from < layers() && edge.to < layers(), PlanError,
                 "an edge from layer " + std::to_string(edge.from) + " to " + std::to_string(edge.to) +
                     " names a layer that is not there: there are " + std::to_string(layers()));
    inputs_[edge.to].push_back(edge.from);
    users_[edge.from].push_back(edge.to);
  }
  HYDRA_EXPECT(breadth_first().size() == layers(), PlanError, "the edges form a cycle: give a graph without one");
}

std::vector<std::size_t> Precedence::order(bool newest_first) const {
  std::vector<std::size_t> missing(layers());
  std::deque<std::size_t> ready;
  for (std::size_t layer = 0; layer < layers(); ++layer) {
    missing[layer] = inputs_[layer].size();
    if (missing[layer] == 0) {
      ready.push_back(layer);
    }
  }
  std::vector<std::size_t> found;
  while (!ready.empty()) {
    const std::size_t layer = newest_first ? ready.back() : ready.front();
    newest_first ? ready.pop_back() : ready.pop_front();
    found.push_back(layer);
    for (const std::size_t user : users_[layer]) {
      if (--missing[user] == 0) {
        ready.push_back(user);
      }
    }
  }
  return found;
}

void Precedence::append_larger(const LayerSet& set, std::vector<LayerSet>* found) const {
  const auto placed = [&](std::size_t input) { return set.has(input); };
  for (std::size_t layer = 0; layer < layers(); ++layer) {
    if (!set.has(layer) && std::ranges::all_of(inputs_[layer], placed)) {
      found->push_back(set);
      found->back().add(layer);
    }
  }
}

void Precedence::append_smaller(const LayerSet& set, std::vector<LayerSet>* found) const {
  const auto placed = [&](std::size_t user) { return set.has(user); };
  for (const std::size_t layer : set.layers()) {
    if (std::ranges::none_of(users_[layer], placed)) {
      found->push_back(set);
      found->back().remove(layer);
    }
  }
}

std::optional<std::vector<LayerSet>> Precedence::downsets(std::size_t limit) const {
  std::vector<LayerSet> found = {LayerSet(layers())};
  std::size_t level = 0;  // of downsets with equally many layers, the first
  while (level < found.size()) {
    std::unordered_set<LayerSet> larger;
    std::vector<LayerSet> steps;
    for (std::size_t i = level; i < found.size(); ++i) {
      steps.clear();
      append_larger(found[i], &steps);
      larger.insert(steps.begin(), steps.end());
      if (found.size() + larger.size() > limit) {
        return std::nullopt;
      }
    }
    level = found.size();
    found.insert(found.end(), larger.begin(), larger.end());
    std::sort(found.begin() + static_cast<std::ptrdiff_t>(level), found.end());
  }
  return found;
}

std::vector<LayerSet> Precedence::neighbours(const LayerSet& from, std::size_t limit) const {
  std::vector<LayerSet> found = {from};
  std::unordered_set<LayerSet> seen = {from};
  std::vector<LayerSet> steps;
  for (std::size_t i = 0; i < found.size() && found.size() < limit; ++i) {
    steps.clear();
    append_larger(found[i], &steps);
    append_smaller(found[i], &steps);
    for (const LayerSet& step : steps) {
      if (found.size() < limit && seen.insert(step).second) {
        found.push_back(step);
      }
    }
  }
  return found;
}

}  // namespace hydra

std::size_t std::hash<hydra::LayerSet>::operator()(const hydra::LayerSet& set) const noexcept {
  std::uint64_t mixed = 0;
  for (const std::uint64_t word : set.words_) {
    mixed = (mixed ^ word) * 0x9e3779b97f4a7c15;
    mixed ^= mixed >> 29;
  }
  return static_cast<std::size_t>(mixed);
}
