// A lower bound on the makespan of every schedule of units.
//
//   max(compute of all jobs / devices, loads of all jobs / devices, the longest job)
//
// Loads are those that no schedule can do without, and a job's length includes its first load. One device does nothing
// before its first load, and after its last load it runs at least the unit that needed it; so its bound is
//
//   max(compute + least first load, loads + least unit that begins a run)
//
// Without a link loads are 0, and this is Hydra's yardstick.
//
// Reentrant, without state. Equal means: to one part in 10^12.
#pragma once

#include <span>

#include "csrc/plan/units/unit_chain.h"

namespace hydra {

double units_bound(std::span<const UnitChain> jobs, std::int64_t devices);

}  // namespace hydra
