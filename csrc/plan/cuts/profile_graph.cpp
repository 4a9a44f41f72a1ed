#include "csrc/plan/cuts/profile_graph.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <unordered_set>

namespace hydra {

namespace {

constexpr std::size_t kMostWaiting = 20'000'000;  // nodes that sets in a search may add: 80 MB

bool is_profiled_amount(double value) { return std::isfinite(value) && value >= 0; }

void check_profile_nodes(const std::vector<ProfileNode>& nodes) {
  HYDRA_EXPECT(!nodes.empty(), PlanError, "a graph of 0 layers cannot be cut into stages: give at least one layer");
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    HYDRA_EXPECT(is_profiled_amount(nodes[i].compute_ms) && is_profiled_amount(nodes[i].activation_bytes) &&
                     is_profiled_amount(nodes[i].parameter_bytes),
                 PlanError,
                 "layer " + std::to_string(i) +
                     " has a time or a size that is negative or not finite: give finite numbers from 0");
  }
}

}  // namespace

bool NodeSet::is_within(const NodeSet& other) const noexcept {
  for (std::size_t i = 0; i < words_.size(); ++i) {
    if ((words_[i] & ~other.words_[i]) != 0) {
      return false;
    }
  }
  return true;
}

bool NodeSet::meets(const NodeSet& other) const noexcept {
  for (std::size_t i = 0; i < words_.size(); ++i) {
    if ((words_[i] & other.words_[i]) != 0) {
      return true;
    }
  }
  return false;
}

int NodeSet::count() const noexcept {
  int found = 0;
  for (const std::uint64_t word : words_) {
    found += std::popcount(word);
  }
  return found;
}

NodeSet& NodeSet::operator|=(const NodeSet& other) noexcept {
  for (std::size_t i = 0; i < words_.size(); ++i) {
    words_[i] |= other.words_[i];
  }
  return *this;
}

NodeSet& NodeSet::operator&=(const NodeSet& other) noexcept {
  for (std::size_t i = 0; i < words_.size(); ++i) {
    words_[i] &= other.words_[i];
  }
  return *this;
}

NodeSet& NodeSet::operator-=(const NodeSet& other) noexcept {
  for (std::size_t i = 0; i < words_.size(); ++i) {
    words_[i] &= ~other.words_[i];
  }
  return *this;
}

std::size_t NodeSetHash::operator()(const NodeSet& set) const noexcept {
  std::uint64_t hash = 0x9E3779B97F4A7C15U;
  for (const std::uint64_t word : set.words()) {
    hash = (hash ^ word) * 0xFF51AFD7ED558CCDU;
    hash ^= hash >> 32U;
  }
  return static_cast<std::size_t>(hash);
}

ProfileGraph::ProfileGraph(std::vector<ProfileNode> nodes, const std::vector<Edge>& edges)
    : nodes_(std::move(nodes)), before_(nodes_.size()), after_(nodes_.size()) {
  check_profile_nodes(nodes_);
  for (const auto& [from, to] : edges) {
    HYDRA_EXPECT(from >= 0 && from < size() && to >= 0 && to < size(), PlanError,
                 "edge " + std::to_string(from) + " to " + std::to_string(to) + " names a layer outside the graph of " +
                     std::to_string(size()) + ": number layers from 0");
    after_[static_cast<std::size_t>(from)].push_back(to);
    before_[static_cast<std::size_t>(to)].push_back(from);
  }
  for (std::vector<std::vector<int>>* side : {&before_, &after_}) {
    for (std::vector<int>& neighbours : *side) {
      std::sort(neighbours.begin(), neighbours.end());
      neighbours.erase(std::unique(neighbours.begin(), neighbours.end()), neighbours.end());
    }
  }
  sort_nodes();
  ancestors_.assign(nodes_.size(), NodeSet(size()));
  descendants_ = ancestors_;
  for (const int node : order_) {
    NodeSet& mine = ancestors_[static_cast<std::size_t>(node)];
    mine.add(node);
    for (const int each : predecessors(node)) {
      mine |= ancestors(each);
    }
  }
  for (auto node = order_.rbegin(); node != order_.rend(); ++node) {
    NodeSet& mine = descendants_[static_cast<std::size_t>(*node)];
    mine.add(*node);
    for (const int each : successors(*node)) {
      mine |= descendants(each);
    }
  }
}

void ProfileGraph::sort_nodes() {
  std::vector<std::size_t> missing;
  std::vector<int> ready;  // a stack, so that the branch that was begun last goes on
  for (int node = size() - 1; node >= 0; --node) {
    if (predecessors(node).empty()) {
      ready.push_back(node);
    }
  }
  for (const std::vector<int>& each : before_) {
    missing.push_back(each.size());
  }
  while (!ready.empty()) {
    const int node = ready.back();
    ready.pop_back();
    order_.push_back(node);
    for (const int each : successors(node)) {
      if (--missing[static_cast<std::size_t>(each)] == 0) {
        ready.push_back(each);
      }
    }
  }
  const auto cyclic = std::find_if(missing.begin(), missing.end(), [](std::size_t count) { return count > 0; });
  HYDRA_EXPECT(cyclic == missing.end(), PlanError,
               "layer " + std::to_string(cyclic - missing.begin()) +
                   " is on a cycle, or behind one: a layer cannot run before its own output; remove an edge");
}

ProfileSums ProfileGraph::sums(const NodeSet& set) const noexcept {
  ProfileSums found;
  set.for_each([&](int index) {
    const ProfileNode& each = node(index);
    found.compute_ms += each.compute_ms;
    found.activation_bytes += each.activation_bytes;
    found.parameter_bytes += each.parameter_bytes;
  });
  return found;
}

double ProfileGraph::crossing_bytes(const NodeSet& set) const noexcept {
  double found = 0;
  set.for_each([&](int index) {
    const std::vector<int>& next = successors(index);
    if (std::any_of(next.begin(), next.end(), [&](int each) { return !set.has(each); })) {
      found += node(index).activation_bytes;
    }
  });
  return found;
}

std::vector<int> ProfileGraph::addable(const NodeSet& closed) const {
  std::vector<int> found;
  for (int index = 0; index < size(); ++index) {
    const std::vector<int>& needed = predecessors(index);
    if (!closed.has(index) && std::all_of(needed.begin(), needed.end(), [&](int each) { return closed.has(each); })) {
      found.push_back(index);
    }
  }
  return found;
}

std::vector<int> ProfileGraph::removable(const NodeSet& closed) const {
  std::vector<int> found;
  closed.for_each([&](int index) {
    const std::vector<int>& next = successors(index);
    if (std::none_of(next.begin(), next.end(), [&](int each) { return closed.has(each); })) {
      found.push_back(index);
    }
  });
  return found;
}

std::optional<std::vector<NodeSet>> ProfileGraph::closed_sets(std::size_t limit) const {
  std::vector<NodeSet> found = {NodeSet(size())};
  std::vector<std::vector<int>> next = {addable(found.front())};
  const auto hash = [&](std::size_t index) { return NodeSetHash()(found[index]); };
  const auto equal = [&](std::size_t left, std::size_t right) { return found[left] == found[right]; };
  std::unordered_set<std::size_t, decltype(hash), decltype(equal)> known(16, hash, equal);
  known.insert(0);
  std::size_t waiting = next.front().size();  // nodes in `next`
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::vector<int> mine = std::move(next[i]);
    waiting -= mine.size();
    for (const int node : mine) {
      NodeSet larger = found[i];
      larger.add(node);
      found.push_back(std::move(larger));
      if (!known.insert(found.size() - 1).second) {
        found.pop_back();
        continue;
      }
      if (found.size() > limit) {
        return std::nullopt;
      }
      std::vector<int> later;
      std::copy_if(mine.begin(), mine.end(), std::back_inserter(later), [&](int other) { return other != node; });
      for (const int each : successors(node)) {
        const std::vector<int>& needed = predecessors(each);
        if (std::all_of(needed.begin(), needed.end(), [&](int other) { return found.back().has(other); })) {
          later.push_back(each);
        }
      }
      waiting += later.size();
      next.push_back(std::move(later));
      if (waiting > kMostWaiting) {
        return std::nullopt;
      }
    }
  }
  return found;
}

}  // namespace hydra
