#include "csrc/plan/jobs/job_batch.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "csrc/plan/chain.h"

namespace hydra {

namespace {

constexpr int kMostGpus = 4096;  // of a node

std::string counted(int number, const char* what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

void check_job(const TrainingJob& job, int largest) {
  HYDRA_EXPECT(!job.options.empty(), PlanError, "job '" + job.name + "' has no options: give at least one");
  int least = job.options.front().gpus;
  for (const JobOption& option : job.options) {
    HYDRA_EXPECT(option.gpus >= 1, PlanError,
                 "job '" + job.name + "' has an option on " + counted(option.gpus, "GPU") + ": give at least 1");
    HYDRA_EXPECT(std::isfinite(option.seconds) && option.seconds >= 0, PlanError,
                 "job '" + job.name + "' has an option of " + std::to_string(option.seconds) +
                     " seconds: give a finite number of at least 0");
    least = std::min(least, option.gpus);
  }
  HYDRA_EXPECT(least <= largest, PlanError,
               "job '" + job.name + "' fits no node: its smallest option needs " + counted(least, "GPU") +
                   ", and the largest node has " + std::to_string(largest) + ": give a node of at least " +
                   counted(least, "GPU") + ", or an option on fewer");
}

}  // namespace

void check_batch(const JobBatch& batch) {
  HYDRA_EXPECT(!batch.nodes.empty(), PlanError, "there is no node: give at least one");
  for (const int gpus : batch.nodes) {
    HYDRA_EXPECT(gpus >= 1 && gpus <= kMostGpus, PlanError,
                 "a node has " + counted(gpus, "GPU") + ": give a number from 1 to " + std::to_string(kMostGpus));
  }
  const int largest = *std::max_element(batch.nodes.begin(), batch.nodes.end());
  double longest = 0;
  for (const TrainingJob& job : batch.jobs) {
    check_job(job, largest);
    for (const JobOption& option : job.options) {
      longest = std::max(longest, option.seconds);
    }
  }
  HYDRA_EXPECT(std::isfinite(longest * static_cast<double>(batch.jobs.size()) * kMostGpus), PlanError,
               "the jobs' seconds are too many to count: give smaller numbers");
}

double makespan_of(const JobBatch& batch, const std::vector<JobPlacement>& placements) {
  HYDRA_EXPECT(placements.size() == batch.jobs.size(), PlanError,
               "there are " + std::to_string(placements.size()) + " placements for " +
                   std::to_string(batch.jobs.size()) + " jobs: give one for each");
  double makespan = 0;
  std::vector<std::vector<std::pair<double, int>>> changes(batch.nodes.size());  // of GPUs in use, by time
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const JobPlacement& placed = placements[i];
    HYDRA_EXPECT(placed.option < batch.jobs[i].options.size() && placed.node < batch.nodes.size() && placed.start >= 0,
                 PlanError,
                 "job '" + batch.jobs[i].name + "' is placed with an option, node or start that is not there");
    const JobOption& option = batch.jobs[i].options[placed.option];
    HYDRA_EXPECT(option.gpus <= batch.nodes[placed.node], PlanError,
                 "job '" + batch.jobs[i].name + "' needs " + counted(option.gpus, "GPU") + " of node " +
                     std::to_string(placed.node) + ", which has " + std::to_string(batch.nodes[placed.node]));
    if (option.seconds > 0) {
      changes[placed.node].emplace_back(placed.start, option.gpus);
      changes[placed.node].emplace_back(placed.start + option.seconds, -option.gpus);
    }
    makespan = std::max(makespan, placed.start + option.seconds);
  }
  for (std::size_t node = 0; node < changes.size(); ++node) {
    std::sort(changes[node].begin(), changes[node].end());  // at one time, ends come before starts
    int used = 0;
    for (const auto& [time, change] : changes[node]) {
      used += change;
      HYDRA_EXPECT(used <= batch.nodes[node], PlanError,
                   "jobs need " + counted(used, "GPU") + " of node " + std::to_string(node) + " at " +
                       std::to_string(time) + " s, and it has " + std::to_string(batch.nodes[node]));
    }
  }
  return makespan;
}

}  // namespace hydra
