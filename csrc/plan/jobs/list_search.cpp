#include "csrc/plan/jobs/list_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace hydra {

namespace {

// In percent of all moves. Found by trials on batches of 10 to 300 jobs.
constexpr std::size_t kFromLastNode = 50;  // take a job of the node that ends last
constexpr std::size_t kSwaps = 50;
constexpr std::size_t kSameNode = 33;  // of the other moves stay on the job's node
constexpr std::size_t kSimilar = 50;   // of swaps choose the most similar one of a few jobs
constexpr std::size_t kNewChoice = 20;
constexpr int kPartners = 4;
constexpr std::int64_t kMovesPerCooling = 64;
constexpr std::int64_t kWorkOfMove = 200;  // beside placements

}  // namespace

ListSearch::ListSearch(const OptionTable& table, JobLists start, std::uint64_t seed)
    : table_(table), random_(seed), best_(std::move(start)), makespan_(makespan_of(table, best_)) {}

void ListSearch::run(std::int64_t work, const Cooling& cooling, double goal) {
  if (makespan_ <= goal) {
    return;
  }
  PlacedLists lists(table_, best_);
  double cost = lists.cost();
  const double scale = makespan_ * cooling.first;
  double temperature = scale;
  std::int64_t done = 0;
  for (std::int64_t moves = 0; done < work; ++moves) {
    done = lists.work() + moves * kWorkOfMove;
    if (moves % kMovesPerCooling == 0) {
      const double part = static_cast<double>(done) / static_cast<double>(work);
      temperature = scale * std::pow(cooling.last / cooling.first, part);
    }
    const double limit = cost + temperature * rise();
    if (!propose(lists) || lists.cost_of(move_, limit) > limit) {
      continue;
    }
    lists.apply(move_);
    cost = lists.cost();
    if (lists.makespan() < makespan_) {
      makespan_ = lists.makespan();
      best_ = lists.lists();
      if (makespan_ <= goal) {
        return;
      }
    }
  }
}

bool ListSearch::propose(const PlacedLists& lists) {
  move_.list_count = 0;
  move_.job_count = 0;
  const std::size_t job = any_job(lists);
  return chance(kSwaps) ? propose_swap(lists, job) : propose_place(lists, job);
}

bool ListSearch::propose_place(const PlacedLists& lists, std::size_t job) {
  const std::size_t source = lists.node_of(job);
  const std::size_t target = chance(kSameNode) ? source : below(table_.nodes().size());
  if (table_.fitting(job, table_.nodes()[target]) == 0) {
    return false;
  }
  const std::size_t choice = any_choice(lists, job, target);
  const std::size_t from = lists.place_of(job);
  const std::size_t others = lists.jobs_of(target).size() - (target == source ? 1 : 0);
  const std::size_t to = below(others + 1);
  if (target == source && to == from && choice == lists.choice(job)) {
    return false;
  }
  change_choice(job, choice);
  ListChange& left = begin_change(lists, source, target == source ? std::min(from, to) : from);
  left.jobs.erase(left.jobs.begin() + static_cast<std::ptrdiff_t>(from));
  ListChange& joined = target == source ? left : begin_change(lists, target, to);
  joined.jobs.insert(joined.jobs.begin() + static_cast<std::ptrdiff_t>(to), job);
  return true;
}

bool ListSearch::propose_swap(const PlacedLists& lists, std::size_t job) {
  const std::size_t other = any_partner(lists, job);
  const std::size_t node = lists.node_of(job);
  const std::size_t other_node = lists.node_of(other);
  if (other == job || table_.fitting(job, table_.nodes()[other_node]) == 0 ||
      table_.fitting(other, table_.nodes()[node]) == 0) {
    return false;
  }
  const std::size_t place = lists.place_of(job);
  const std::size_t other_place = lists.place_of(other);
  change_choice(job, any_choice(lists, job, other_node));
  change_choice(other, any_choice(lists, other, node));
  if (node == other_node) {
    ListChange& change = begin_change(lists, node, std::min(place, other_place));
    std::swap(change.jobs[place], change.jobs[other_place]);
  } else {
    begin_change(lists, node, place).jobs[place] = other;
    begin_change(lists, other_node, other_place).jobs[other_place] = job;
  }
  return true;
}

std::size_t ListSearch::any_job(const PlacedLists& lists) {
  if (table_.nodes().size() > 1 && chance(kFromLastNode)) {
    const std::vector<std::size_t>& jobs = lists.jobs_of(lists.last_node());
    return jobs[below(jobs.size())];
  }
  return below(table_.jobs());
}

std::size_t ListSearch::any_partner(const PlacedLists& lists, std::size_t job) {
  std::size_t partner = below(table_.jobs());
  if (!chance(kSimilar)) {
    return partner;
  }
  const UsefulOption& own = lists.option(job);
  const auto distance = [&](std::size_t other) {
    const UsefulOption& option = lists.option(other);
    const bool is_alike = other != job && option.gpus == own.gpus;
    return is_alike ? std::abs(option.seconds - own.seconds) : std::numeric_limits<double>::infinity();
  };
  for (int i = 1; i < kPartners; ++i) {
    const std::size_t other = below(table_.jobs());
    if (distance(other) < distance(partner)) {
      partner = other;
    }
  }
  return partner;
}

std::size_t ListSearch::any_choice(const PlacedLists& lists, std::size_t job, std::size_t node) {
  const std::size_t fitting = table_.fitting(job, table_.nodes()[node]);
  return chance(kNewChoice) ? below(fitting) : std::min(lists.choice(job), fitting - 1);
}

ListChange& ListSearch::begin_change(const PlacedLists& lists, std::size_t node, std::size_t from) {
  ListChange& change = move_.lists[move_.list_count++];
  change.node = node;
  change.from = from;
  change.jobs = lists.jobs_of(node);
  return change;
}

void ListSearch::change_choice(std::size_t job, std::size_t choice) {
  move_.jobs[move_.job_count] = job;
  move_.choices[move_.job_count++] = choice;
}

/// Multiplies instead of dividing; slightly uneven, which does not matter here.
std::size_t ListSearch::below(std::size_t count) {
  return static_cast<std::size_t>(((random_() >> 32U) * static_cast<std::uint64_t>(count)) >> 32U);
}

double ListSearch::rise() { return -std::log(static_cast<double>((random_() >> 11U) + 1) * 0x1p-53); }

}  // namespace hydra
