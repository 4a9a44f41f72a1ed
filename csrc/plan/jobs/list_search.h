// Searches for lists with a shorter makespan by simulated annealing.
//
// A move changes the options of one or two jobs and their places in one or two nodes' lists: a job goes elsewhere, or
// two jobs change places. It is made if the cost rises by no more than a random amount, which falls during a round.
//
// A round ends after an amount of work, never by the clock. So equal tables, seeds and rounds give equal lists.
// Threads: one. Ownership: refers to the table, which has to outlive it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

#include "csrc/plan/jobs/list_schedule.h"
#include "csrc/plan/jobs/option_table.h"
#include "csrc/plan/jobs/placed_lists.h"

namespace hydra {

/// By how much the cost may rise on average, in parts of the best makespan.
struct Cooling {
  double first = 0;
  double last = 0;
};

class ListSearch {
 public:
  ListSearch(const OptionTable& table, JobLists start, std::uint64_t seed);

  /// Starts from the best lists. Ends after so much work, in free times of GPUs, or once no job ends after `goal`.
  void run(std::int64_t work, const Cooling& cooling, double goal);

  const JobLists& best() const { return best_; }
  double makespan() const { return makespan_; }

 private:
  /// False if the dice have fallen on what changes nothing, or on what does not fit.
  bool propose(const PlacedLists& lists);
  bool propose_place(const PlacedLists& lists, std::size_t job);
  bool propose_swap(const PlacedLists& lists, std::size_t job);
  std::size_t any_job(const PlacedLists& lists);
  std::size_t any_partner(const PlacedLists& lists, std::size_t job);
  std::size_t any_choice(const PlacedLists& lists, std::size_t job, std::size_t node);
  ListChange& begin_change(const PlacedLists& lists, std::size_t node, std::size_t from);
  void change_choice(std::size_t job, std::size_t choice);

  std::size_t below(std::size_t count);
  bool chance(std::size_t percent) { return below(100) < percent; }
  double rise();  // of mean 1

  const OptionTable& table_;
  std::mt19937_64 random_;
  ListMove move_;  // that was proposed last
  JobLists best_;
  double makespan_ = 0;
};

}  // namespace hydra
