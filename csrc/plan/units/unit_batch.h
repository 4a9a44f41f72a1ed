// Trainings of models that are cut into shards, on a few devices: the problem that Hydra (arXiv 2110.08633) solves by
// alternating between them.
//
//   unit      the forward or backward of one shard for a minibatch; it runs once, on one device, without a break
//   job       one model's training: a chain of units, of which one runs at a time, in order, on any device
//   shard     the weights and states that a unit needs on its device; jobs share none
//   eligible  a unit that heads its job's chain while no other unit of the job runs
//   resident  the shard of the unit that a device ran last, unless the job has run elsewhere since. The job's next unit
//             needs no load if it has that shard
//   buffer    room of a device for one more shard, which loads while a unit runs
//   link      bytes per second from the host to a device; each device has one of its own
//   makespan  the seconds until the last unit ends
//
// Plain values. Units are seconds and bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hydra {

struct ShardUnit {
  double seconds = 0;  // of compute
  std::uint64_t shard = 0;
  double bytes = 0;  // that a load moves
};

struct UnitJob {
  std::string name;  // for messages
  std::vector<ShardUnit> units;
  std::int64_t repeats = 1;  // the chain is the units so many times: epochs times minibatches, if they are one's
};

struct UnitBatch {
  std::int64_t devices = 1;    // all alike
  std::optional<double> link;  // none: loads take no time
  std::vector<UnitJob> jobs;
};

/// Throws PlanError unless every number makes sense.
void check_units(const UnitBatch& batch);

}  // namespace hydra
