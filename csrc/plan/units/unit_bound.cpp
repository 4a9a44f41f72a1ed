#include "csrc/plan/units/unit_bound.h"

#include <algorithm>
#include <limits>

namespace hydra {

double units_bound(std::span<const UnitChain> jobs, std::int64_t devices) {
  if (jobs.empty()) {
    return 0;
  }
  double compute = 0;
  double loads = 0;
  double longest = 0;
  double least_load = std::numeric_limits<double>::infinity();
  double least_first = std::numeric_limits<double>::infinity();
  for (const UnitChain& job : jobs) {
    compute += job.remaining(0);
    loads += job.least_loads();
    longest = std::max(longest, job.load_seconds(0) + job.remaining(0));
    least_load = std::min(least_load, job.load_seconds(0));
    least_first = std::min(least_first, job.least_first());
  }
  if (devices == 1) {
    return std::max(compute + least_load, loads + least_first);
  }
  const double count = static_cast<double>(devices);
  return std::max({compute / count, loads / count, longest});
}

}  // namespace hydra
