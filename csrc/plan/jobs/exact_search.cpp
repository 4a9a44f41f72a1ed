#include "csrc/plan/jobs/exact_search.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "csrc/plan/chain.h"

namespace hydra {

namespace {

constexpr double kRoundingOfArea = 1e-12;    // relative, of sums
constexpr std::size_t kMostKnown = 200'000;  // states that are remembered

bool are_equal(const std::vector<UsefulOption>& a, const std::vector<UsefulOption>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const UsefulOption& one, const UsefulOption& other) {
    return one.gpus == other.gpus && one.seconds == other.seconds;
  });
}

void append_bytes(std::string& text, const std::vector<double>& numbers) {
  text.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double));
}

}  // namespace

ExactSearch::ExactSearch(const OptionTable& table) : table_(table) {
  HYDRA_EXPECT(table.jobs() <= kMostJobs, PlanError, "too many jobs for an exact search: give fewer");
  for (std::size_t job = 0; job < table.jobs(); ++job) {
    equal_before_.push_back(job);
    for (std::size_t other = 0; other < job; ++other) {
      if (are_equal(table.of(other), table.of(job))) {
        equal_before_[job] = other;
      }
    }
  }
}

bool ExactSearch::run(double known, std::int64_t branches) {
  nodes_.clear();
  for (const int gpus : table_.nodes()) {
    nodes_.push_back({std::vector<double>(static_cast<std::size_t>(gpus), 0.0), true});
  }
  lists_ = {std::vector<std::size_t>(table_.jobs()), std::vector<std::vector<std::size_t>>(nodes_.size())};
  left_ = static_cast<std::uint32_t>((std::uint64_t{1} << table_.jobs()) - 1);
  limit_ = known * (1 - kRoundingOfArea);
  branches_ = branches;
  known_.clear();
  found_.reset();
  branch();
  return branches_ > 0;
}

void ExactSearch::branch() {
  if (--branches_ <= 0) {
    return;
  }
  if (left_ == 0) {
    double makespan = 0;
    for (const Node& node : nodes_) {
      makespan = std::max(makespan, node.free.back());
    }
    if (makespan < limit_) {
      limit_ = makespan * (1 - kRoundingOfArea);
      found_ = lists_;
    }
    return;
  }
  const std::optional<std::size_t> node = next_node();
  if (!node || is_cut() || is_known()) {
    return;
  }
  for (std::size_t job = 0; job < table_.jobs(); ++job) {
    if (is_left(job) && !has_equal_before(job)) {
      append(*node, job);
    }
  }
  nodes_[*node].is_open = false;
  branch();
  nodes_[*node].is_open = true;
}

void ExactSearch::append(std::size_t node, std::size_t job) {
  const std::size_t fitting = table_.fitting(job, table_.nodes()[node]);
  for (std::size_t choice = 0; choice < fitting; ++choice) {
    const UsefulOption& option = table_.option(job, choice);
    const std::vector<double> before = nodes_[node].free;
    if (before[static_cast<std::size_t>(option.gpus - 1)] + option.seconds >= limit_ ||
        waits_in_vain(nodes_[node], job, option.gpus)) {
      continue;
    }
    occupy(nodes_[node].free, option.gpus, option.seconds);
    lists_.choice[job] = choice;
    lists_.jobs[node].push_back(job);
    left_ ^= 1U << job;
    branch();
    left_ ^= 1U << job;
    lists_.jobs[node].pop_back();
    nodes_[node].free = before;
  }
}

/// Whether the jobs that are left cannot end before the limit.
bool ExactSearch::is_cut() const {
  double room = 0;
  for (const Node& node : nodes_) {
    if (node.is_open) {
      for (const double free : node.free) {
        room += std::max(0.0, limit_ - free);
      }
    }
  }
  double needed = 0;
  for (std::size_t job = 0; job < table_.jobs(); ++job) {
    if (!is_left(job)) {
      continue;
    }
    double least = std::numeric_limits<double>::infinity();
    for (const UsefulOption& option : table_.of(job)) {
      const bool is_possible = std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) {
        const auto count = static_cast<std::size_t>(option.gpus);
        return node.is_open && count <= node.free.size() && node.free[count - 1] + option.seconds < limit_;
      });
      if (is_possible) {
        least = std::min(least, option.area());
      }
    }
    needed += least;
  }
  return needed > room * (1 + kRoundingOfArea);
}

/// Whether this state was met before. Remembers it.
bool ExactSearch::is_known() {
  std::vector<const Node*> order;
  for (const Node& node : nodes_) {
    if (node.is_open) {
      order.push_back(&node);
    }
  }
  std::sort(order.begin(), order.end(), [](const Node* a, const Node* b) { return a->free < b->free; });
  std::string state(reinterpret_cast<const char*>(&left_), sizeof(left_));
  for (const Node* node : order) {
    const std::uint32_t gpus = static_cast<std::uint32_t>(node->free.size());
    state.append(reinterpret_cast<const char*>(&gpus), sizeof(gpus));
    append_bytes(state, node->free);
  }
  if (known_.size() >= kMostKnown) {
    return known_.contains(state);
  }
  return !known_.insert(std::move(state)).second;
}

/// Whether another job that is left ends before this one starts, on GPUs that wait for it. The lists with that job in
/// between are as good, and are tried too.
bool ExactSearch::waits_in_vain(const Node& node, std::size_t job, int gpus) const {
  const double start = node.free[static_cast<std::size_t>(gpus - 1)];
  for (std::size_t other = 0; other < table_.jobs(); ++other) {
    if (other == job || !is_left(other)) {
      continue;
    }
    for (const UsefulOption& option : table_.of(other)) {
      if (option.gpus < gpus && node.free[static_cast<std::size_t>(option.gpus - 1)] + option.seconds <= start) {
        return true;
      }
    }
  }
  return false;
}

/// Whether a job with the same options is left, and comes first.
bool ExactSearch::has_equal_before(std::size_t job) const {
  return equal_before_[job] != job && is_left(equal_before_[job]);
}

/// The open node with the GPU that is free first.
std::optional<std::size_t> ExactSearch::next_node() const {
  std::optional<std::size_t> next;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].is_open && (!next || nodes_[i].free.front() < nodes_[*next].free.front())) {
      next = i;
    }
  }
  return next;
}

}  // namespace hydra
