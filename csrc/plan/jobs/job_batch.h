// Jobs that train on the GPUs of several nodes: the problem that Saturn (VLDB 2024) calls SPASE, and its solutions.
//
//   job       one model's training; it runs once, on one node, without a break
//   option    a way to run a job: GPUs of one node, and the seconds that it takes on them
//   node      GPUs that are all alike; jobs that run at once need at most as many as it has
//   makespan  the seconds until the last job ends
//
// GPUs of a node have no names: whenever jobs that run at once need no more GPUs than there are, each can have some of
// its own for all its time. So a start and a node for each job describe a schedule.
//
// Plain values. Units are GPUs and seconds.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace hydra {

struct JobOption {
  int gpus = 0;
  double seconds = 0;
};

struct TrainingJob {
  std::string name;  // for messages
  std::vector<JobOption> options;
};

struct JobBatch {
  std::vector<int> nodes;  // GPUs of each
  std::vector<TrainingJob> jobs;
};

struct JobPlacement {
  std::size_t option = 0;  // its place in the job's list
  std::size_t node = 0;
  double start = 0;
};

/// Throws PlanError unless every number makes sense and every job has an option that fits some node.
void check_batch(const JobBatch& batch);

/// The makespan of a placement for each job. Throws PlanError if a node has too few GPUs at some time.
double makespan_of(const JobBatch& batch, const std::vector<JobPlacement>& placements);

}  // namespace hydra
