#include "csrc/plan/cuts/cut_flow.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace hydra {

namespace {

constexpr int kFlowSource = 0;
constexpr int kFlowSink = 1;
constexpr std::int64_t kUnlimitedFlow = std::numeric_limits<std::int64_t>::max() / 4;
constexpr double kLargestFlow = 1LL << 50;    // of scaled activation bytes
constexpr double kLargestPrices = 1LL << 60;  // of all nodes, scaled

}  // namespace

CutFlow::CutFlow(const ProfileGraph& graph, const NodeSet& inside, const NodeSet& outside)
    : graph_(graph), inside_(inside), vertices_(static_cast<std::size_t>(graph.size()), -1) {
  double sum = 0;
  for (int node = 0; node < graph.size(); ++node) {
    sum += graph.node(node).activation_bytes;
  }
  scale_ = sum > 0 ? std::exp2(std::floor(std::log2(kLargestFlow / sum))) : 1;
  vertex();
  vertex();
  for (int node = 0; node < graph.size(); ++node) {
    if (!inside.has(node) && !outside.has(node)) {
      free_.push_back(node);
      vertices_[static_cast<std::size_t>(node)] = vertex();
    }
  }
  for (const int node : free_) {
    connect(kFlowSource, vertices_[static_cast<std::size_t>(node)], 0, 0);
    connect(vertices_[static_cast<std::size_t>(node)], kFlowSink, 0, 0);
  }
  for (const int node : free_) {
    const int mine = vertices_[static_cast<std::size_t>(node)];
    for (const int each : graph.predecessors(node)) {
      if (!inside.has(each)) {
        connect(mine, vertices_[static_cast<std::size_t>(each)], kUnlimitedFlow, 0);
      }
    }
  }
  for (int node = 0; node < graph.size(); ++node) {
    if (!outside.has(node)) {
      add_crossing(node, inside, outside);
    }
  }
  for (const Arc& arc : arcs_) {
    capacities_.push_back(arc.capacity);
  }
}

int CutFlow::vertex() {
  out_.emplace_back();
  return static_cast<int>(out_.size()) - 1;
}

void CutFlow::connect(int from, int to, std::int64_t capacity, std::int64_t back) {
  const std::size_t index = arcs_.size();
  arcs_.push_back({to, capacity});
  arcs_.push_back({from, back});
  out_[static_cast<std::size_t>(from)].push_back(index);
  out_[static_cast<std::size_t>(to)].push_back(index + 1);
}

void CutFlow::add_crossing(int node, const NodeSet& inside, const NodeSet& outside) {
  const auto bytes = static_cast<std::int64_t>(std::floor(graph_.node(node).activation_bytes * scale_));
  std::vector<int> next;
  bool leaves = false;
  for (const int each : graph_.successors(node)) {
    leaves = leaves || outside.has(each);
    if (!inside.has(each) && !outside.has(each)) {
      next.push_back(vertices_[static_cast<std::size_t>(each)]);
    }
  }
  if (bytes == 0 || (!leaves && next.empty())) {
    return;
  }
  const bool fixed = inside.has(node);
  const int from = fixed ? kFlowSource : vertices_[static_cast<std::size_t>(node)];
  if (leaves && fixed) {
    fixed_ += bytes;
  } else if (leaves) {
    connect(from, kFlowSink, bytes, 0);
  } else if (next.size() == 1) {
    connect(from, next.front(), bytes, 0);
  } else {
    const int own = vertex();
    connect(from, own, bytes, 0);
    for (const int each : next) {
      connect(own, each, kUnlimitedFlow, 0);
    }
  }
}

CutFlow::Least CutFlow::least(const std::vector<double>& weights, double price) {
  for (std::size_t i = 0; i < arcs_.size(); ++i) {
    arcs_[i].capacity = capacities_[i];
  }
  double weight = 0;
  for (const int node : free_) {
    weight += weights[static_cast<std::size_t>(node)];
  }
  if (std::abs(price) * weight * scale_ > kLargestPrices) {
    price = std::copysign(kLargestPrices / (weight * scale_), price);
  }
  std::int64_t value = fixed_;
  for (std::size_t i = 0; i < free_.size(); ++i) {
    const double exact = std::abs(price) * weights[static_cast<std::size_t>(free_[i])] * scale_;
    if (price >= 0) {
      arcs_[4 * i + 2].capacity = static_cast<std::int64_t>(std::floor(exact));
    } else {
      const auto gain = static_cast<std::int64_t>(std::ceil(exact));
      arcs_[4 * i].capacity = gain;
      value -= gain;
    }
  }
  value += flow();
  Least found{inside_, price, static_cast<double>(value) / scale_};
  double fixed_weight = 0;
  inside_.for_each([&](int node) { fixed_weight += weights[static_cast<std::size_t>(node)]; });
  found.value += price * fixed_weight;
  for (const int node : free_) {
    if (level_[static_cast<std::size_t>(vertices_[static_cast<std::size_t>(node)])] >= 0) {
      found.set.add(node);
    }
  }
  return found;
}

bool CutFlow::find_levels() {
  level_.assign(out_.size(), -1);
  level_[kFlowSource] = 0;
  std::vector<int> reached = {kFlowSource};
  for (std::size_t i = 0; i < reached.size(); ++i) {
    const auto from = static_cast<std::size_t>(reached[i]);
    work_ += static_cast<std::int64_t>(out_[from].size());
    for (const std::size_t index : out_[from]) {
      const Arc& arc = arcs_[index];
      int& level = level_[static_cast<std::size_t>(arc.to)];
      if (arc.capacity > 0 && level < 0) {
        level = level_[from] + 1;
        reached.push_back(arc.to);
      }
    }
  }
  return level_[kFlowSink] >= 0;
}

std::int64_t CutFlow::push(int from, std::int64_t most) {
  if (from == kFlowSink) {
    return most;
  }
  std::int64_t pushed = 0;
  const auto mine = static_cast<std::size_t>(from);
  for (; next_[mine] < out_[mine].size(); ++next_[mine]) {
    ++work_;
    const std::size_t index = out_[mine][next_[mine]];
    Arc& arc = arcs_[index];
    if (arc.capacity > 0 && level_[static_cast<std::size_t>(arc.to)] == level_[mine] + 1) {
      const std::int64_t part = push(arc.to, std::min(most - pushed, arc.capacity));
      arc.capacity -= part;
      arcs_[index ^ 1U].capacity += part;
      pushed += part;
      if (pushed == most) {
        return pushed;
      }
    }
  }
  return pushed;
}

std::int64_t CutFlow::flow() {
  std::int64_t total = 0;
  while (find_levels()) {
    next_.assign(out_.size(), 0);
    total += push(kFlowSource, kUnlimitedFlow);
  }
  return total;
}

}  // namespace hydra
