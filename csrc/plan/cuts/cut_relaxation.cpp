#include "csrc/plan/cuts/cut_relaxation.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

namespace hydra {

namespace {

constexpr double kRounding = 1e-12;    // relative to a sum over all nodes
constexpr std::size_t kMostEnds = 64;  // boxes that keep the empty set and the whole graph out
constexpr std::size_t kMostLines = 9;  // of a box
constexpr double kNarrow = 1e-3;       // of all compute time: lines are not drawn for less

NodeSet all_nodes(const ProfileGraph& graph) {
  NodeSet all(graph.size());
  for (int node = 0; node < graph.size(); ++node) {
    all.add(node);
  }
  return all;
}

double part(double value, double sum) noexcept { return sum > 0 ? value / sum : 0; }

void widen(Interval& interval, const Interval& other) noexcept {
  interval.low = std::min(interval.low, other.low);
  interval.high = std::max(interval.high, other.high);
}

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
    : graph_(graph), terms_(terms), total_(graph.sums(all_nodes(graph))), complete_(sets), open_(1, 1) {
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
    return time > 0 ? graph_.node(node).*amount / time : kNever;
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
    if (right.first - left.first < kNarrow * total_.compute_ms) {
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

int CutRelaxation::divider(const Box& box) const {
  NodeSet free(graph_.size());
  for (const int node : box.free) {
    free.add(node);
  }
  const ProfileSums all = graph_.sums(free);
  const auto size = [&](NodeSet set) {
    set &= free;
    const ProfileSums mine = graph_.sums(set);
    return part(mine.compute_ms, all.compute_ms) + part(mine.activation_bytes, all.activation_bytes) +
           part(mine.parameter_bytes, all.parameter_bytes) + part(set.count(), static_cast<double>(box.free.size()));
  };
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
                            : part(box.compute.high - box.compute.low, total_.compute_ms) +
                                  part(box.parameters.high - box.parameters.low, total_.parameter_bytes);
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

bool CutRelaxation::refine(std::size_t boxes) {
  if (complete_) {
    return false;
  }
  const Relaxed all = relaxed();
  std::set<std::size_t, std::greater<>> chosen;  // descending: a division moves the last box
  for (std::size_t cut = 1; cut + 1 < all.cuts.size(); ++cut) {
    if (terms_.transfers) {
      chosen.insert(all.owners[cut].crossing);
    }
    chosen.insert({all.owners[cut].low, all.owners[cut].high});
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

std::size_t CutRelaxation::step(double amount, double total) const noexcept {
  const double place = part(amount, total) * static_cast<double>(side_);
  return std::min(side_ - 1, static_cast<std::size_t>(std::max(0.0, place)));
}

bool CutRelaxation::is_open(const Point& point) const noexcept {
  const std::size_t row = step(point.compute, total_.compute_ms);
  return open_[row * side_ + step(point.parameters, total_.parameter_bytes)] != 0;
}

/// The cuts of the cells, as boxes and sets are added to them.
class CutRelaxation::CellCuts {
 public:
  explicit CellCuts(const CutRelaxation& owner)
      : owner_(owner), cuts_(owner.open_.size(), kEmptyCut), owners_(owner.open_.size()) {}

  void add(const Box& box, std::size_t index) {
    const double total = owner_.total_.compute_ms;
    const double slack = kRounding * total;
    const double width = total / static_cast<double>(owner_.side_);
    const std::size_t last = owner_.step(box.compute.high + slack, total);
    for (std::size_t row = owner_.step(box.compute.low - slack, total); row <= last; ++row) {
      const Interval compute{std::max(box.compute.low, static_cast<double>(row) * width - slack),
                             std::min(box.compute.high, static_cast<double>(row + 1) * width + slack)};
      double crossing = 0;
      for (const Line& line : box.lines) {
        crossing = std::max(crossing, line.least - line.price * (line.price >= 0 ? compute.high : compute.low));
      }
      const auto range = [&](const Interval& all, const Yield& yield) {
        const double least = all.high - yield.most(box.compute.high - compute.low);
        return Interval{std::max(all.low, least),
                        std::min(all.high, all.low + yield.most(compute.high - box.compute.low))};
      };
      add_row(
          row,
          {compute, range(box.activations, box.activation_yield), range(box.parameters, box.parameter_yield), crossing},
          index);
    }
  }

  void add(const Point& point, std::size_t index) {
    const std::size_t row = owner_.step(point.compute, owner_.total_.compute_ms);
    add_row(row,
            {{point.compute, point.compute},
             {point.activations, point.activations},
             {point.parameters, point.parameters},
             point.crossing},
            index);
  }

  void move_to(Relaxed& found) {
    for (std::size_t cell = 0; cell < cuts_.size(); ++cell) {
      if (cuts_[cell].crossing_bytes < kNever) {
        found.cuts.push_back(cuts_[cell]);
        found.owners.push_back(owners_[cell]);
        found.cells.push_back(cell);
      }
    }
  }

 private:
  static constexpr Interval kEmpty{kNever, -kNever};
  static constexpr Cut kEmptyCut{kEmpty, kEmpty, kEmpty, kNever};

  /// Adds sets with these sums to the cells of a row.
  void add_row(std::size_t row, const Cut& sets, std::size_t index) {
    const double total = owner_.total_.parameter_bytes;
    const bool exact = sets.parameter_bytes.low == sets.parameter_bytes.high;
    const double slack = exact ? 0 : kRounding * total;
    const double width = total / static_cast<double>(owner_.side_);
    const std::size_t last = owner_.step(sets.parameter_bytes.high + slack, total);
    for (std::size_t column = owner_.step(sets.parameter_bytes.low - slack, total); column <= last; ++column) {
      const std::size_t cell = row * owner_.side_ + column;
      if (owner_.open_[cell] == 0) {
        continue;
      }
      Interval parameters = sets.parameter_bytes;
      if (!exact) {
        parameters.low = std::max(parameters.low, static_cast<double>(column) * width - slack);
        parameters.high = std::min(parameters.high, static_cast<double>(column + 1) * width + slack);
      }
      Cut& cut = cuts_[cell];
      Owners& mine = owners_[cell];
      mine.crossing = sets.crossing_bytes < cut.crossing_bytes ? index : mine.crossing;
      mine.low = parameters.low < cut.parameter_bytes.low ? index : mine.low;
      mine.high = parameters.high > cut.parameter_bytes.high ? index : mine.high;
      cut.crossing_bytes = std::min(cut.crossing_bytes, sets.crossing_bytes);
      widen(cut.compute_ms, sets.compute_ms);
      widen(cut.activation_bytes, sets.activation_bytes);
      widen(cut.parameter_bytes, parameters);
    }
  }

  const CutRelaxation& owner_;
  std::vector<Cut> cuts_;
  std::vector<Owners> owners_;
};

CutRelaxation::Relaxed CutRelaxation::relaxed() const {
  CellCuts cells(*this);
  if (complete_) {
    for (std::size_t i = 0; i < points_.size(); ++i) {
      cells.add(points_[i], i);
    }
  }
  for (std::size_t i = 0; i < boxes_.size(); ++i) {
    cells.add(boxes_[i], i);
  }
  Relaxed found;
  found.cuts.emplace_back();
  found.owners.emplace_back();
  cells.move_to(found);
  found.cuts.push_back({{total_.compute_ms, total_.compute_ms},
                        {total_.activation_bytes, total_.activation_bytes},
                        {total_.parameter_bytes, total_.parameter_bytes},
                        0});
  found.order = CutOrder(found.cuts.size());
  const std::size_t last = found.cuts.size() - 1;
  for (std::size_t before = 0; before < last; ++before) {
    for (std::size_t after = std::max<std::size_t>(before, 1); after < last; ++after) {
      if (before == 0 || found.cells[before - 1] % side_ <= found.cells[after - 1] % side_) {
        found.order.allow(before, after);
      }
    }
    found.order.allow(before, last);
  }
  return found;
}

StageTimes CutRelaxation::stage_times(const Relaxed& all, double limit) const {
  if (terms_.levels.size() == 1) {
    return {};
  }
  return best_times(all.cuts, all.order, chain_terms(terms_, 0), chain_terms(terms_, 1), limit);
}

void CutRelaxation::narrow(double limit) {
  std::vector<char> finer(4 * open_.size());
  for (std::size_t row = 0; row < 2 * side_; ++row) {
    for (std::size_t column = 0; column < 2 * side_; ++column) {
      finer[row * 2 * side_ + column] = open_[row / 2 * side_ + column / 2];
    }
  }
  side_ *= 2;
  open_ = std::move(finer);
  const Relaxed all = relaxed();
  const ChainTerms last = chain_terms(terms_, terms_.levels.size() - 1);
  const StageTimes times = stage_times(all, limit);
  const std::vector<bool> usable = CutChains(all.cuts, all.order, last, times).usable(limit);
  open_.assign(open_.size(), 0);
  for (std::size_t i = 0; i < all.cells.size(); ++i) {
    open_[all.cells[i]] = usable[i + 1] ? 1 : 0;
  }
  if (complete_) {
    std::erase_if(points_, [&](const Point& point) { return !is_open(point); });
  }
}

double CutRelaxation::bound(double bound, double known, double precision) const {
  const Relaxed all = relaxed();
  const ChainTerms last = chain_terms(terms_, terms_.levels.size() - 1);
  const StageTimes times = stage_times(all, known);
  return std::max(bound, best_chain(CutChains(all.cuts, all.order, last, times), bound, known, precision).bound);
}

std::vector<NodeSet> CutRelaxation::candidates() const {
  std::vector<NodeSet> found;
  for (const Point& each : points_) {
    if (is_open(each)) {
      found.push_back(each.set);
    }
  }
  return found;
}

}  // namespace hydra
