// The options of a batch that a search has to try.
//
// An option is left out if another one of its job takes no more GPUs and no more seconds, or if no node has so many
// GPUs. So those of a job have ascending GPUs and descending seconds.
//
// Constant once it is made. Ownership: none of the batch.
#pragma once

#include <cstddef>
#include <vector>

#include "csrc/plan/jobs/job_batch.h"

namespace hydra {

struct UsefulOption {
  int gpus = 0;
  double seconds = 0;
  std::size_t place = 0;  // in the job's own list

  double area() const { return gpus * seconds; }
};

class OptionTable {
 public:
  /// Throws PlanError if the batch makes no sense.
  explicit OptionTable(const JobBatch& batch);

  std::size_t jobs() const { return options_.size(); }
  const std::vector<UsefulOption>& of(std::size_t job) const { return options_[job]; }
  const UsefulOption& option(std::size_t job, std::size_t choice) const { return options_[job][choice]; }

  /// How many of the job's options fit a node of so many GPUs. They are the first ones.
  std::size_t fitting(std::size_t job, int gpus) const;

  const std::vector<int>& nodes() const { return nodes_; }
  int largest_node() const { return largest_node_; }
  int gpus() const { return gpus_; }  // of all nodes

  /// The least seconds within which every job has an option.
  double longest_job() const;

 private:
  std::vector<std::vector<UsefulOption>> options_;
  std::vector<int> nodes_;
  int largest_node_ = 0;
  int gpus_ = 0;
};

}  // namespace hydra
