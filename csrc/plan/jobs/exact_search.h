// Finds a schedule with the shortest makespan, by branch and bound, and so proves it. For a few jobs.
//
// The node with a GPU that is free first gets the next job of its list, one of those that are left with one of its
// options, or no more jobs. A branch ends if what is left needs more GPU seconds than there are before the makespan to
// beat, or one of its jobs more time. It also ends at a state that was met before, where jobs with equal options and
// nodes with equal free times count as one, and where a job that is left would fit into the time that the next one
// waits.
//
// Ends after a number of branches. Threads: one. Ownership: refers to the table, which has to outlive it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/plan/jobs/list_schedule.h"
#include "csrc/plan/jobs/option_table.h"

namespace hydra {

class ExactSearch {
 public:
  static constexpr std::size_t kMostJobs = 16;

  /// The batch has at most kMostJobs jobs.
  explicit ExactSearch(const OptionTable& table);

  /// Looks for lists with a makespan below `known`. True if there are none better than what `found` returns then, or
  /// none at all; false if the branches were used up.
  bool run(double known, std::int64_t branches);

  /// The best lists below `known`.
  const std::optional<JobLists>& found() const { return found_; }

 private:
  struct Node {
    std::vector<double> free;  // ascending
    bool is_open = true;
  };

  void branch();
  void append(std::size_t node, std::size_t job);
  bool is_cut() const;
  bool is_known();
  bool waits_in_vain(const Node& node, std::size_t job, int gpus) const;
  bool has_equal_before(std::size_t job) const;
  std::optional<std::size_t> next_node() const;
  bool is_left(std::size_t job) const { return (left_ >> job & 1U) != 0; }

  const OptionTable& table_;
  std::vector<std::size_t> equal_before_;  // the job with the same options that was given just before, or itself
  std::vector<Node> nodes_;
  JobLists lists_;
  std::uint32_t left_ = 0;  // a bit for each job
  double limit_ = 0;        // that makespans have to be below
  std::int64_t branches_ = 0;
  std::unordered_set<std::string> known_;
  std::optional<JobLists> found_;
};

}  // namespace hydra
