// Lists whose jobs are placed, so that a change of one or two of them costs only the placements behind it.
//
// The cost is the makespan, and a part of the mean time at which a GPU has ended: without that part nothing would tell
// two lists apart whose last job is the same one.
//
// Threads: one. Ownership: refers to the table, which has to outlive it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "csrc/plan/jobs/list_schedule.h"
#include "csrc/plan/jobs/option_table.h"

namespace hydra {

/// A list in place of a node's own one.
struct ListChange {
  std::size_t node = 0;
  std::size_t from = 0;  // the first place that differs
  std::vector<std::size_t> jobs;
};

/// New lists of one or two nodes, and new options of one or two jobs in them. Its memory is used again.
struct ListMove {
  std::array<ListChange, 2> lists;
  std::size_t list_count = 0;
  std::array<std::size_t, 2> jobs = {};
  std::array<std::size_t, 2> choices = {};
  std::size_t job_count = 0;
};

class PlacedLists {
 public:
  PlacedLists(const OptionTable& table, const JobLists& lists);

  std::size_t choice(std::size_t job) const { return choice_[job]; }
  const UsefulOption& option(std::size_t job) const { return option_[job]; }
  std::size_t node_of(std::size_t job) const { return node_[job]; }
  const std::vector<std::size_t>& jobs_of(std::size_t node) const { return lists_[node].jobs; }
  std::size_t place_of(std::size_t job) const;  // in its node's list
  std::size_t last_node() const;                // whose jobs end last

  double makespan() const { return end_without({}); }
  double cost() const;
  std::int64_t work() const { return work_; }  // so far, in free times of GPUs

  /// The cost after a move. If that is above the limit, any number above it, which saves placements.
  double cost_of(ListMove& move, double limit);
  void apply(ListMove& move);

  JobLists lists() const;

 private:
  struct NodeList {
    std::vector<std::size_t> jobs;
    std::vector<double> free;  // when each GPU is free, before each job and after the last one
    double end = 0;
    double sum = 0;  // of the last free times
  };

  struct Outcome {
    double end = 0;
    double sum = 0;
  };

  std::size_t gpus_of(std::size_t node) const { return static_cast<std::size_t>(table_.nodes()[node]); }
  double end_without(std::span<const ListChange> changed) const;
  double cost_from(double end, double sum) const { return end + kMeanPart * sum / table_.gpus(); }
  double area_after(const ListMove& move) const;
  void exchange_choices(ListMove& move);
  double cost_of_placed(const ListMove& move, double end, double latest);
  std::optional<Outcome> outcome_of(const ListChange& change, double latest);
  void place_from(NodeList& list, std::size_t gpus, std::size_t from);

  static std::int64_t work_of(std::size_t placements, std::size_t gpus) {
    return static_cast<std::int64_t>(placements * (gpus + kOverhead));
  }

  static constexpr double kMeanPart = 0.3;
  static constexpr std::size_t kOverhead = 8;  // of a placement, in free times

  const OptionTable& table_;
  std::vector<std::size_t> choice_;
  std::vector<UsefulOption> option_;  // that of the choice
  std::vector<std::size_t> node_;
  std::vector<NodeList> lists_;
  double area_ = 0;  // GPU seconds of all choices
  double sum_ = 0;   // of the last free times of all GPUs
  std::vector<double> scratch_;
  std::int64_t work_ = 0;
};

}  // namespace hydra
