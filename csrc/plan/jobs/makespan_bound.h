// Lower bounds on the makespan of every schedule.
//
// A makespan T is refuted by two functions f and h: GPUs and seconds of a job count as f(GPUs) and h(seconds / T), and
// the least products of all jobs, each over its options within T, exceed what all nodes can hold.
//
//   f  any function; a node holds the most that GPU counts of options can add up to in it, by dynamic programming
//   h  dual feasible: whatever adds up to at most 1 has values that do so, as do the jobs of one GPU
//
// The plain ones give total work over all GPUs, and a refutation needs no h where some job has no option within T.
// A schedule within less than T is one within T, so no makespan below a refuted one exists.
//
// Reentrant, without state. Equal means: to one part in 10^12.
#pragma once

#include "csrc/plan/jobs/option_table.h"

namespace hydra {

/// The larger of: fewest GPU seconds of all jobs over all GPUs; the longest of all jobs' shortest options.
double plain_bound(const OptionTable& table);

/// At least the plain bound. Looks for refuted makespans up to `known`, that of a schedule.
double makespan_bound(const OptionTable& table, double known);

}  // namespace hydra
