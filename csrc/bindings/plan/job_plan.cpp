// Bindings of the planner of jobs. hydra_ext.plan is the public interface.
#include "csrc/plan/jobs/job_plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bindings.h"

namespace py = pybind11;

namespace hydra {

namespace {

using JobValues = std::tuple<std::string, std::vector<std::pair<int, double>>>;
using PlacementValues = std::tuple<std::size_t, std::size_t, double>;
using JobPlanValues = std::tuple<std::vector<PlacementValues>, double, double>;

JobPlanValues planned(const std::vector<int>& nodes, const std::vector<JobValues>& jobs, const JobPlanTerms& terms) {
  JobBatch batch{nodes, {}};
  for (const auto& [name, options] : jobs) {
    TrainingJob& job = batch.jobs.emplace_back();
    job.name = name;
    for (const auto& [gpus, seconds] : options) {
      job.options.push_back({gpus, seconds});
    }
  }
  const JobPlan plan = plan_jobs(batch, terms);
  std::vector<PlacementValues> placements;
  for (const JobPlacement& placed : plan.placements) {
    placements.emplace_back(placed.option, placed.node, placed.start);
  }
  return {placements, plan.makespan, plan.bound};
}

}  // namespace

void bind_job_plan(py::module_& module) {
  module.def(
      "plan_jobs",
      [](const std::vector<int>& nodes, const std::vector<JobValues>& jobs, std::uint64_t seed, int effort) {
        const py::gil_scoped_release released;
        return planned(nodes, jobs, {seed, effort});
      },
      py::arg("nodes"), py::arg("jobs"), py::kw_only(), py::arg("seed"), py::arg("effort"),
      "Nodes are GPUs, jobs (name, [(GPUs, seconds)]). Returns placements (option, node, start), makespan and bound.");
}

}  // namespace hydra
