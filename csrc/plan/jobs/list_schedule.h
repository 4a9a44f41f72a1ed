// Schedules from lists: each node starts its jobs in the order of its list, each as early as its GPUs allow.
//
// No schedule is better than all of these: with every node's jobs in the order of their starts, no job starts later
// than it did.
//
// Reentrant, without state.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "csrc/plan/jobs/job_batch.h"
#include "csrc/plan/jobs/option_table.h"

namespace hydra {

/// Takes the GPUs that are free first. `free` has the moment from which on each GPU of a node is free, ascending.
/// Returns the start.
inline double occupy(std::span<double> free, int gpus, double seconds) {
  const auto count = static_cast<std::size_t>(gpus);
  const double start = free[count - 1];
  const double end = start + seconds;
  std::size_t to = 0;
  for (std::size_t from = count; from < free.size() && free[from] < end; ++from) {
    free[to++] = free[from];
  }
  for (const std::size_t last = to + count; to < last; ++to) {
    free[to] = end;
  }
  return start;
}

/// Each job's option, as a place in the table, and each node's list.
struct JobLists {
  std::vector<std::size_t> choice;
  std::vector<std::vector<std::size_t>> jobs;
};

std::vector<JobPlacement> place_jobs(const OptionTable& table, const JobLists& lists);

/// The makespan of those placements.
double makespan_of(const OptionTable& table, const JobLists& lists);

/// The best of a few dozen lists: jobs take their fewest GPU seconds within a limit, for several limits, and go to the
/// node that can start them first, longest or widest ones first.
JobLists greedy_lists(const OptionTable& table);

}  // namespace hydra
