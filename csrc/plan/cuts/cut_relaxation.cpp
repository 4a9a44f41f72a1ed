#include "csrc/plan/cuts/cut_relaxation.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "csrc/plan/cuts/cut_reach.h"

namespace hydra {

namespace {

constexpr std::size_t kMostEnds = 64;   // boxes that keep the empty set and the whole graph out
constexpr std::size_t kMostLines = 9;   // of a box
constexpr std::size_t kBoxSteps = 64;   // that a box and a cell count as, as a measure of work
constexpr double kSmallestCell = 1e-5;  // of a sum over all nodes: cells are not halved below
constexpr double kNarrowLine = 1e-3;    // of all compute time: lines are not drawn for less

NodeSet all_nodes(const ProfileGraph& graph) {
  NodeSet all(graph.size());
  for (int node = 0; node < graph.size(); ++node) {
    all.add(node);
  }
  return all;
}

double ratio_of(double value, double sum) noexcept { return sum > 0 ? value / sum : 0; }

void widen_interval(Interval& interval, const Interval& other) noexcept {
  interval.low = std::min(interval.low, other.low);
  interval.high = std::max(interval.high, other.high);
}

double length_of(const Interval& interval) noexcept { return interval.high - interval.low; }

/// The part of an interval that lies in another one, with `slack` around it.
Interval within_interval(const Interval& interval, const Interval& other, double slack) noexcept {
  return {std::max(interval.low, other.low - slack), std::min(interval.high, other.high + slack)};
}

constexpr Interval kEmptyInterval{kUnbounded, -kUnbounded};

}  // namespace

double CutRelaxation::Yield::most(double time) const noexcept {
  const auto above = std::upper_bound(times.begin(), times.end(), time);
  if (above == times.end()) {
    return amounts.back();
  }
  if (above == times.begin()) {
    return 0;
  }
  const auto right = static_cast<std::size_t>(above - times.begin());
  const double share = (time - times[right - 1]) / (times[right] - times[right - 1]);
  return amounts[right - 1] + share * (amounts[right] - amounts[right - 1]);
}

CutRelaxation::CutRelaxation(const ProfileGraph& graph, const PipelineTerms& terms,
                             const std::optional<std::vector<NodeSet>>& sets)
    : graph_(graph), terms_(terms), total_(graph.sums(all_nodes(graph))), complete_(sets) {
  cells_.push_back({{0, total_.compute_ms}, {0, total_.parameter_bytes}, {}});
  if (!complete_) {
    add_boxes();
    return;
  }
  for (const NodeSet& set : *sets) {
    const int count = set.count();
    if (count > 0 && count < graph.size()) {
      points_.push_back(point(set));
    }
  }
  cells_.front().points.resize(points_.size());
  std::iota(cells_.front().points.begin(), cells_.front().points.end(), 0);
}

CutRelaxation::Point CutRelaxation::point(NodeSet set) const {
  const ProfileSums sums = graph_.sums(set);
  const double crossing = graph_.crossing_bytes(set);
  return {std::move(set), sums.compute_ms, sums.parameter_bytes, sums.activation_bytes, crossing};
}

void CutRelaxation::add_boxes() {
  std::vector<int> sources;
  std::vector<int> sinks;
  for (int node = 0; node < graph_.size(); ++node) {
    if (graph_.predecessors(node).empty()) {
      sources.push_back(node);
    }
    if (graph_.successors(node).empty()) {
      sinks.push_back(node);
    }
  }
  if (sources.size() * sinks.size() > kMostEnds) {
    add_box(NodeSet(graph_.size()), NodeSet(graph_.size()));
    return;
  }
  NodeSet missed(graph_.size());  // a box for the first source that a set has, and the first sink that it lacks
  for (const int source : sources) {
    NodeSet had(graph_.size());
    for (const int sink : sinks) {
      NodeSet inside = graph_.ancestors(source);
      inside |= had;
      NodeSet outside = graph_.descendants(sink);
      outside |= missed;
      if (!inside.meets(outside)) {
        add_box(std::move(inside), std::move(outside));
      }
      had |= graph_.ancestors(sink);
    }
    missed |= graph_.descendants(source);
  }
}

CutRelaxation::Yield CutRelaxation::yield(const Box& box, double ProfileNode::* amount) const {
  std::vector<int> nodes = box.free;
  const auto ratio = [&](int node) {
    const double time = graph_.node(node).compute_ms;
    return time > 0 ? graph_.node(node).*amount / time : kUnbounded;
  };
  std::stable_sort(nodes.begin(), nodes.end(), [&](int left, int right) { return ratio(left) > ratio(right); });
  Yield found{{0}, {0}};
  for (const int node : nodes) {
    const double time = graph_.node(node).compute_ms;
    const double value = graph_.node(node).*amount;
    if (time > 0) {
      found.times.push_back(found.times.back() + time);
      found.amounts.push_back(found.amounts.back() + value);
    } else {
      found.amounts.back() += value;
    }
  }
  return found;
}

void CutRelaxation::add_box(NodeSet inside, NodeSet outside) {
  Box box;
  NodeSet widest = all_nodes(graph_);
  widest -= outside;
  const ProfileSums low = graph_.sums(inside);
  const ProfileSums high = graph_.sums(widest);
  box.compute = {low.compute_ms, high.compute_ms};
  box.parameters = {low.parameter_bytes, high.parameter_bytes};
  box.activations = {low.activation_bytes, high.activation_bytes};
  NodeSet free = widest;
  free -= inside;
  free.for_each([&](int node) { box.free.push_back(node); });
  box.inside = std::move(inside);
  box.outside = std::move(outside);
  box.parameter_yield = yield(box, &ProfileNode::parameter_bytes);
  box.activation_yield = yield(box, &ProfileNode::activation_bytes);
  points_.push_back(point(box.inside));
  if (!box.free.empty()) {
    points_.push_back(point(widest));
  }
  if (terms_.transfers) {
    draw_lines(box, widest);
  }
  boxes_.push_back(std::move(box));
}

void CutRelaxation::draw_lines(Box& box, const NodeSet& widest) {
  if (box.free.empty()) {
    box.lines.push_back({0, graph_.crossing_bytes(box.inside)});
    return;
  }
  std::vector<double> times;
  for (int node = 0; node < graph_.size(); ++node) {
    times.push_back(graph_.node(node).compute_ms);
  }
  CutFlow flow(graph_, box.inside, box.outside);
  const auto draw = [&](double price) {
    CutFlow::Least least = flow.least(times, price);
    box.lines.push_back({least.price, least.value});
    points_.push_back(point(std::move(least.set)));
    return std::pair(points_.back().compute, points_.back().crossing);
  };
  const std::pair cheapest = draw(0);
  std::vector<std::pair<std::pair<double, double>, std::pair<double, double>>> sides = {
      {{box.compute.low, graph_.crossing_bytes(box.inside)}, cheapest},
      {cheapest, {box.compute.high, graph_.crossing_bytes(widest)}}};
  for (std::size_t i = 0; i < sides.size() && box.lines.size() < kMostLines; ++i) {
    const auto [left, right] = sides[i];
    if (right.first - left.first < kNarrowLine * total_.compute_ms) {
      continue;
    }
    const double price = (left.second - right.second) / (right.first - left.first);
    const std::pair below = draw(price);
    const double drop = left.second + price * left.first - (below.second + price * below.first);
    if (drop > 1e-9 * left.second && below.first > left.first && below.first < right.first) {
      sides.emplace_back(left, below);
      sides.emplace_back(below, right);
    }
  }
  work_ += flow.work();
}

int CutRelaxation::divider(const Box& box) {
  NodeSet free(graph_.size());
  for (const int node : box.free) {
    free.add(node);
  }
  const ProfileSums all = graph_.sums(free);
  const auto size = [&](NodeSet set) {
    set &= free;
    const ProfileSums mine = graph_.sums(set);
    return ratio_of(mine.compute_ms, all.compute_ms) + ratio_of(mine.activation_bytes, all.activation_bytes) +
           ratio_of(mine.parameter_bytes, all.parameter_bytes) +
           ratio_of(set.count(), static_cast<double>(box.free.size()));
  };
  work_ += static_cast<std::int64_t>(box.free.size() * box.free.size());
  int best = box.free.front();
  double most = -1;
  for (const int node : box.free) {
    const double least = std::min(size(graph_.ancestors(node)), size(graph_.descendants(node)));
    if (least > most) {
      most = least;
      best = node;
    }
  }
  return best;
}

void CutRelaxation::divide_box(std::size_t index) {
  const int node = divider(boxes_[index]);
  const Box whole = std::move(boxes_[index]);
  if (index + 1 < boxes_.size()) {
    boxes_[index] = std::move(boxes_.back());
  }
  boxes_.pop_back();
  NodeSet inside = whole.inside;
  inside |= graph_.ancestors(node);
  NodeSet outside = whole.outside;
  outside |= graph_.descendants(node);
  add_box(std::move(inside), whole.outside);
  add_box(whole.inside, std::move(outside));
}

void CutRelaxation::divide(std::size_t boxes) {
  const auto size = [&](const Box& box) {
    return box.free.empty() ? -1
                            : ratio_of(box.compute.high - box.compute.low, total_.compute_ms) +
                                  ratio_of(box.parameters.high - box.parameters.low, total_.parameter_bytes);
  };
  while (!boxes_.empty() && boxes_.size() < boxes) {
    const auto largest = std::max_element(boxes_.begin(), boxes_.end(),
                                          [&](const Box& left, const Box& right) { return size(left) < size(right); });
    if (largest->free.empty()) {
      return;
    }
    divide_box(static_cast<std::size_t>(largest - boxes_.begin()));
  }
}

bool CutRelaxation::refine(double limit, std::size_t boxes) {
  if (complete_) {
    return false;
  }
  const Relaxed all = relaxed();
  const std::vector<Interval> cheap = usable(all, limit);
  std::set<std::size_t, std::greater<>> chosen;  // descending: a division moves the last box
  for (std::size_t cut = 1; cut + 1 < all.cuts.size(); ++cut) {
    if (cheap[cut].low > cheap[cut].high) {
      continue;
    }
    if (terms_.transfers) {
      chosen.insert(all.owners[cut - 1].crossing);
    }
    chosen.insert({all.owners[cut - 1].low, all.owners[cut - 1].high});
  }
  bool divided = false;
  for (const std::size_t index : chosen) {
    if (!boxes_[index].free.empty() && boxes_.size() < boxes) {
      divide_box(index);
      divided = true;
    }
  }
  return divided;
}

bool CutRelaxation::add(const Box& box, std::size_t index, const Cell& cell, Cut& cut, Owners& owners) const {
  const double slack = kSumRounding * total_.compute_ms;
  const double byte_slack = kSumRounding * total_.parameter_bytes;
  const Interval compute = within_interval(box.compute, cell.compute, slack);
  if (compute.low > compute.high || box.parameters.low > cell.parameters.high + byte_slack ||
      box.parameters.high < cell.parameters.low - byte_slack) {
    return false;
  }
  const auto range = [&](const Interval& all, const Yield& yield) {
    const double least = all.high - yield.most(box.compute.high - compute.low + slack);
    const double most = all.low + yield.most(compute.high - box.compute.low + slack);
    return Interval{std::max(all.low, least), std::min(all.high, most)};
  };
  const Interval parameters = within_interval(range(box.parameters, box.parameter_yield), cell.parameters, byte_slack);
  if (parameters.low > parameters.high + byte_slack) {
    return false;
  }
  double crossing = 0;
  for (const Line& line : box.lines) {
    crossing = std::max(crossing, line.least - line.price * (line.price >= 0 ? compute.high : compute.low));
  }
  owners.crossing = crossing < cut.crossing_bytes ? index : owners.crossing;
  owners.low = parameters.low < cut.parameter_bytes.low ? index : owners.low;
  owners.high = parameters.high > cut.parameter_bytes.high ? index : owners.high;
  cut.crossing_bytes = std::min(cut.crossing_bytes, crossing);
  widen_interval(cut.compute_ms, compute);
  widen_interval(cut.parameter_bytes, parameters);
  widen_interval(cut.activation_bytes,
                 terms_.memory_cap ? range(box.activations, box.activation_yield) : box.activations);
  return true;
}

void CutRelaxation::add(const Point& point, Cut& cut) const noexcept {
  widen_interval(cut.compute_ms, {point.compute, point.compute});
  widen_interval(cut.parameter_bytes, {point.parameters, point.parameters});
  widen_interval(cut.activation_bytes, {point.activations, point.activations});
  cut.crossing_bytes = std::min(cut.crossing_bytes, point.crossing);
}

CutRelaxation::Relaxed CutRelaxation::relaxed() {
  work_ += static_cast<std::int64_t>(cells_.size() * (kBoxSteps * boxes_.size() + cells_.size()) + points_.size());
  Relaxed found;
  found.cuts.emplace_back();
  for (const Cell& cell : cells_) {
    Cut& cut = found.cuts.emplace_back(Cut{kEmptyInterval, kEmptyInterval, kEmptyInterval, kUnbounded});
    Owners& owners = found.owners.emplace_back();
    for (const std::size_t index : cell.points) {
      add(points_[index], cut);
    }
    for (std::size_t index = 0; index < boxes_.size(); ++index) {
      add(boxes_[index], index, cell, cut, owners);
    }
  }
  found.cuts.push_back({{total_.compute_ms, total_.compute_ms},
                        {total_.activation_bytes, total_.activation_bytes},
                        {total_.parameter_bytes, total_.parameter_bytes},
                        0});
  found.order = CutOrder(found.cuts.size());
  const std::size_t last = found.cuts.size() - 1;
  for (std::size_t before = 0; before < last; ++before) {
    const Cut& from = found.cuts[before];
    for (std::size_t after = std::max<std::size_t>(before, 1); after < last; ++after) {
      const Cut& to = found.cuts[after];
      if (from.compute_ms.low <= to.compute_ms.high && from.parameter_bytes.low <= to.parameter_bytes.high) {
        found.order.allow(before, after);
      }
    }
    found.order.allow(before, last);
  }
  return found;
}

StageTimes CutRelaxation::inner_times(const Relaxed& all, double limit) {
  const ChainTerms inner = chain_terms(terms_, 0);
  const auto cuts = static_cast<std::int64_t>(all.cuts.size());
  work_ += cuts * cuts * cuts / 4 * inner.machines;
  return best_times(all.cuts, all.order, inner, chain_terms(terms_, 1), limit);
}

std::vector<Interval> CutRelaxation::usable(const Relaxed& all, double limit) {
  if (terms_.levels.size() == 1) {
    const ChainTerms terms = chain_terms(terms_, 0);
    CutReach reach(all.cuts, all.order, terms, limit);
    std::vector<Interval> found = reach.usable();
    work_ += reach.work();
    return found;
  }
  const ChainTerms outer = chain_terms(terms_, 1);
  const StageTimes times = inner_times(all, limit);
  std::vector<Interval> found;
  for (const bool each : CutChains(all.cuts, all.order, outer, times).usable(limit)) {
    found.push_back(each ? Interval{0, total_.compute_ms} : kEmptyInterval);
  }
  return found;
}

void CutRelaxation::narrow(double limit) {
  if (terms_.levels.size() > 1) {
    return;  // inner pipelines may be cut where no outer stage ends
  }
  const Relaxed all = relaxed();
  const std::vector<Interval> kept = usable(all, limit);
  const double slack = kSumRounding * total_.compute_ms;
  std::vector<Cell> cells;
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    const Cut& cut = all.cuts[i + 1];
    Cell cell{within_interval(cut.compute_ms, kept[i + 1], slack), cut.parameter_bytes, std::move(cells_[i].points)};
    std::erase_if(cell.points, [&](std::size_t index) {
      return points_[index].compute < cell.compute.low || points_[index].compute > cell.compute.high;
    });
    if (cell.compute.low <= cell.compute.high && (!complete_ || !cell.points.empty())) {
      cells.push_back(std::move(cell));
    }
  }
  cells_ = std::move(cells);
}

bool CutRelaxation::halves(const Cell& cell, Cell& low, Cell& high) const {
  const double bytes_per_ms = terms_.levels.back().bytes_per_second / 1000;
  const bool compute_matters = terms_.transfers || terms_.levels.size() > 1;
  const double compute =
      length_of(cell.compute) > kSmallestCell * total_.compute_ms && compute_matters ? length_of(cell.compute) : 0;
  const double reduce = length_of(cell.parameters) > kSmallestCell * total_.parameter_bytes
                            ? 4 * length_of(cell.parameters) / bytes_per_ms
                            : 0;
  if (compute == 0 && reduce == 0) {
    return false;
  }
  const bool at_compute = compute >= reduce;
  Interval Cell::* side = at_compute ? &Cell::compute : &Cell::parameters;
  const double middle = ((cell.*side).low + (cell.*side).high) / 2;
  low = {cell.compute, cell.parameters, {}};
  high = low;
  (low.*side).high = middle;
  (high.*side).low = middle;
  for (const std::size_t index : cell.points) {
    const double place = at_compute ? points_[index].compute : points_[index].parameters;
    (place <= middle ? low : high).points.push_back(index);
  }
  return true;
}

bool CutRelaxation::halve(double limit, std::size_t cells) {
  const std::vector<Interval> cheap = usable(relaxed(), limit);
  std::vector<Cell> finer;
  bool halved = false;
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    Cell low;
    Cell high;
    const std::size_t waiting = cells_.size() - i;
    if (cheap[i + 1].low <= cheap[i + 1].high && finer.size() + waiting < cells && halves(cells_[i], low, high)) {
      halved = true;
      finer.push_back(std::move(low));
      finer.push_back(std::move(high));
    } else {
      finer.push_back(std::move(cells_[i]));
    }
  }
  if (complete_) {
    std::erase_if(finer, [](const Cell& cell) { return cell.points.empty(); });
  }
  cells_ = std::move(finer);
  return halved;
}

double CutRelaxation::bound(double bound, double known, double precision) {
  const Relaxed all = relaxed();
  const ChainTerms last = chain_terms(terms_, terms_.levels.size() - 1);
  if (terms_.levels.size() == 1) {
    return reach_bound(all.cuts, all.order, last, bound, known, precision, work_);
  }
  const StageTimes times = inner_times(all, known);
  return std::max(bound, best_chain(CutChains(all.cuts, all.order, last, times), bound, known, precision).bound);
}

std::vector<NodeSet> CutRelaxation::candidates(std::size_t most) const {
  std::vector<std::tuple<std::size_t, double, std::size_t>> sorted;  // cell, crossing, point
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    const Cell& cell = cells_[i];
    for (const std::size_t index : cell.points) {
      sorted.emplace_back(i, points_[index].crossing, index);
    }
    for (std::size_t index = 0; index < points_.size() && !complete_; ++index) {
      const Point& each = points_[index];
      if (each.compute >= cell.compute.low && each.compute <= cell.compute.high &&
          each.parameters >= cell.parameters.low && each.parameters <= cell.parameters.high) {
        sorted.emplace_back(i, each.crossing, index);
      }
    }
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::pair<std::size_t, std::size_t>> ranked;  // place in its cell, point
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const bool first = i == 0 || std::get<0>(sorted[i]) != std::get<0>(sorted[i - 1]);
    const std::size_t index = std::get<2>(sorted[i]);
    if (first || points_[index].set != points_[ranked.back().second].set) {
      ranked.emplace_back(first ? 0 : ranked.back().first + 1, index);
    }
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& left, const auto& right) { return left.first < right.first; });
  std::vector<NodeSet> found;
  for (std::size_t i = 0; i < ranked.size() && i < most; ++i) {
    found.push_back(points_[ranked[i].second].set);
  }
  return found;
}

std::optional<std::size_t> CutRelaxation::sets() const {
  if (!complete_) {
    return std::nullopt;
  }
  std::size_t found = 0;
  for (const Cell& cell : cells_) {
    found += cell.points.size();
  }
  return found;
}

}  // namespace hydra
