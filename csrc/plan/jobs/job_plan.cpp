#include "csrc/plan/jobs/job_plan.h"

#include <algorithm>
#include <array>
#include <string>

#include "csrc/plan/chain.h"
#include "csrc/plan/jobs/exact_search.h"
#include "csrc/plan/jobs/list_schedule.h"
#include "csrc/plan/jobs/list_search.h"
#include "csrc/plan/jobs/makespan_bound.h"
#include "csrc/plan/jobs/option_table.h"

namespace hydra {

namespace {

constexpr double kSameMakespan = 1e-10;          // relative
constexpr std::int64_t kFirstBranches = 20'000;  // of an exact search before the others
constexpr std::int64_t kBranches = 500'000;      // of one after them
constexpr double kWorkOfJob = 3e7;               // of a pass
constexpr double kWorkOfBatch = 9e8;             // at most, with up to kManyJobs
constexpr double kManyJobs = 100;                // from here on work grows with the square of the jobs
constexpr double kMostGrowth = 5;

struct Round {
  double part = 0;  // of the pass's work
  Cooling cooling;
};

// Hot rounds find good options, the cold one their order.
constexpr Round kHot = {0.08, {1e-2, 3e-5}};
constexpr std::array<Round, 4> kPass = {kHot, kHot, kHot, Round{0.76, {3e-3, 1e-5}}};

double work_of_pass(std::size_t jobs) {
  const double count = static_cast<double>(jobs);
  const double growth = std::clamp(count * count / (kManyJobs * kManyJobs), 1.0, kMostGrowth);
  return std::min(kWorkOfJob * count, kWorkOfBatch) * growth;
}

/// The best lists so far, and what is known about all others.
struct Search {
  JobLists lists;
  double makespan = 0;
  double bound = 0;

  bool is_proved() const { return bound >= makespan * (1 - kSameMakespan); }
};

void search_exactly(const OptionTable& table, std::int64_t branches, Search& search) {
  if (search.is_proved() || table.jobs() > ExactSearch::kMostJobs) {
    return;
  }
  ExactSearch exact(table);
  const bool is_complete = exact.run(search.makespan, branches);
  if (exact.found()) {
    search.lists = *exact.found();
    search.makespan = makespan_of(table, search.lists);
  }
  search.bound = is_complete ? search.makespan : search.bound;
}

void anneal(const OptionTable& table, const JobPlanTerms& terms, Search& search) {
  ListSearch annealing(table, search.lists, terms.seed);
  for (int pass = 0; pass < terms.effort; ++pass) {
    for (const Round& round : kPass) {
      annealing.run(static_cast<std::int64_t>(round.part * work_of_pass(table.jobs())), round.cooling,
                    search.bound * (1 + kSameMakespan));
    }
  }
  search.lists = annealing.best();
  search.makespan = annealing.makespan();
  search.bound = std::max(search.bound, makespan_bound(table, search.makespan));
}

}  // namespace

JobPlan plan_jobs(const JobBatch& batch, const JobPlanTerms& terms) {
  HYDRA_EXPECT(terms.effort >= 1, PlanError,
               "effort=" + std::to_string(terms.effort) + ": give a whole number of at least 1");
  const OptionTable table(batch);
  Search search{greedy_lists(table), 0, 0};
  search.makespan = makespan_of(table, search.lists);
  search.bound = makespan_bound(table, search.makespan);
  search_exactly(table, kFirstBranches, search);
  if (!search.is_proved()) {
    anneal(table, terms, search);
    search_exactly(table, kBranches * terms.effort, search);
  }
  JobPlan plan{place_jobs(table, search.lists), 0, 0};
  plan.makespan = makespan_of(batch, plan.placements);
  plan.bound = search.is_proved() ? plan.makespan : std::min(search.bound, plan.makespan);
  return plan;
}

}  // namespace hydra
