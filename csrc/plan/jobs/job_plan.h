// Plans for a batch of jobs: which option each job uses, on which node, from when on, for a short makespan.
//
// Greedy lists are improved by annealing, as long as they do not meet the bound; a few jobs are then searched exactly.
// More effort never gives a longer makespan, since it adds rounds to the same ones. Nothing depends on the clock: equal
// batches and terms have equal plans.
//
// Reentrant, without state. Units are those of job_batch.h. Equal means: to one part in 10^10.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/plan/jobs/job_batch.h"

namespace hydra {

struct JobPlanTerms {
  std::uint64_t seed = 0;
  int effort = 1;  // passes of the search; one takes up to a second for 100 jobs, and ten for 300
};

struct JobPlan {
  std::vector<JobPlacement> placements;
  double makespan = 0;
  double bound = 0;  // no plan has a shorter makespan; equal to it if this one is proved to be the best
};

/// Throws PlanError if the batch makes no sense, or the effort is not at least 1.
JobPlan plan_jobs(const JobBatch& batch, const JobPlanTerms& terms = {});

}  // namespace hydra
