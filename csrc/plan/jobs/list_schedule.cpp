#include "csrc/plan/jobs/list_schedule.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>

namespace hydra {

namespace {

using FreeTimes = std::vector<std::vector<double>>;  // of each node's GPUs

constexpr std::size_t kLimits = 48;  // that are tried

FreeTimes all_free(const OptionTable& table) {
  FreeTimes free;
  for (const int gpus : table.nodes()) {
    free.emplace_back(static_cast<std::size_t>(gpus), 0.0);
  }
  return free;
}

/// The option of the fewest GPU seconds among those within the limit, or the shortest one.
std::size_t leanest(const std::vector<UsefulOption>& options, double limit) {
  std::size_t best = options.size() - 1;
  for (std::size_t i = 0; i < options.size(); ++i) {
    if (options[i].seconds <= limit && (options[best].seconds > limit || options[i].area() < options[best].area())) {
      best = i;
    }
  }
  return best;
}

enum class ListOrder { kLongest, kLargest, kWidest };

std::pair<double, double> rank(const UsefulOption& option, ListOrder by) {
  switch (by) {
    case ListOrder::kLongest:
      return {option.seconds, option.gpus};
    case ListOrder::kLargest:
      return {option.area(), option.seconds};
    case ListOrder::kWidest:
      return {option.gpus, option.seconds};
  }
  return {};
}

JobLists lists_of(const OptionTable& table, double limit, ListOrder by) {
  JobLists lists{std::vector<std::size_t>(table.jobs()), std::vector<std::vector<std::size_t>>(table.nodes().size())};
  std::vector<std::size_t> order(table.jobs());
  std::iota(order.begin(), order.end(), 0U);
  for (const std::size_t job : order) {
    lists.choice[job] = leanest(table.of(job), limit);
  }
  const auto chosen = [&](std::size_t job) { return table.option(job, lists.choice[job]); };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return rank(chosen(a), by) > rank(chosen(b), by); });
  FreeTimes free = all_free(table);
  for (const std::size_t job : order) {
    const UsefulOption option = chosen(job);
    const auto last = static_cast<std::size_t>(option.gpus - 1);
    std::size_t node = free.size();
    for (std::size_t i = 0; i < free.size(); ++i) {
      if (option.gpus <= table.nodes()[i] && (node == free.size() || free[i][last] < free[node][last])) {
        node = i;
      }
    }
    lists.jobs[node].push_back(job);
    occupy(free[node], option.gpus, option.seconds);
  }
  return lists;
}

/// Limits from that of the longest job on, evenly among all.
std::vector<double> limits_of(const OptionTable& table) {
  const double least = table.longest_job();
  std::vector<double> all;
  for (std::size_t job = 0; job < table.jobs(); ++job) {
    for (const UsefulOption& option : table.of(job)) {
      if (option.seconds >= least) {
        all.push_back(option.seconds);
      }
    }
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  std::vector<double> limits;
  const std::size_t count = std::min(kLimits, all.size());
  for (std::size_t i = 0; i < count; ++i) {
    limits.push_back(all[i * all.size() / count]);
  }
  limits.push_back(std::numeric_limits<double>::infinity());
  return limits;
}

}  // namespace

std::vector<JobPlacement> place_jobs(const OptionTable& table, const JobLists& lists) {
  std::vector<JobPlacement> placements(table.jobs());
  FreeTimes free = all_free(table);
  for (std::size_t node = 0; node < free.size(); ++node) {
    for (const std::size_t job : lists.jobs[node]) {
      const UsefulOption& option = table.option(job, lists.choice[job]);
      placements[job] = {option.place, node, occupy(free[node], option.gpus, option.seconds)};
    }
  }
  return placements;
}

double makespan_of(const OptionTable& table, const JobLists& lists) {
  double makespan = 0;
  FreeTimes free = all_free(table);
  for (std::size_t node = 0; node < free.size(); ++node) {
    for (const std::size_t job : lists.jobs[node]) {
      const UsefulOption& option = table.option(job, lists.choice[job]);
      occupy(free[node], option.gpus, option.seconds);
    }
    makespan = std::max(makespan, free[node].back());
  }
  return makespan;
}

JobLists greedy_lists(const OptionTable& table) {
  JobLists best;
  double least = std::numeric_limits<double>::infinity();
  for (const double limit : limits_of(table)) {
    for (const ListOrder by : {ListOrder::kLongest, ListOrder::kLargest, ListOrder::kWidest}) {
      JobLists lists = lists_of(table, limit, by);
      const double makespan = makespan_of(table, lists);
      if (makespan < least) {
        least = makespan;
        best = std::move(lists);
      }
    }
  }
  return best;
}

}  // namespace hydra
