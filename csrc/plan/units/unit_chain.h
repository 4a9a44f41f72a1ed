// A job's chain of units, by position. Its units are stored once, however often they repeat.
//
// What remains before position p of m units that repeat n times is
//
//   (n - 1 - p / m) * t + r
//
// with t, the seconds of all m units, and r, those of the units from p % m on. With n = e * b, for e epochs of b
// minibatches, this is Hydra's ((e - 1) * b + c - 1) * t + r, where c minibatches are left of the first of e epochs.
//
// Constant once it is made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/plan/units/unit_batch.h"

namespace hydra {

class UnitChain {
 public:
  /// The job has passed check_units().
  UnitChain(const UnitJob& job, std::optional<double> link);

  std::int64_t length() const { return size() * repeats_; }
  double seconds(std::int64_t position) const { return unit(position).seconds; }
  double load_seconds(std::int64_t position) const { return loads_[place(position)]; }

  /// Seconds of compute from this position to the end. Exactly 0 at the end.
  double remaining(std::int64_t position) const {
    return position == length()
               ? 0
               : static_cast<double>(repeats_ - 1 - position / size()) * rest_[0] + rest_[place(position)];
  }

  /// Whether the unit has the shard of the one before it.
  bool continues(std::int64_t position) const {
    return position > 0 && unit(position).shard == unit(position - 1).shard;
  }

  /// The first position from here on whose unit has another shard than this one's; the length if there is none.
  std::int64_t run_end(std::int64_t position) const;

  /// Seconds of the loads that no schedule can do without: one for each run of units with one shard.
  double least_loads() const;

  /// The least seconds of a unit that begins a run.
  double least_first() const;

 private:
  std::int64_t size() const { return static_cast<std::int64_t>(units_.size()); }
  std::size_t place(std::int64_t position) const { return static_cast<std::size_t>(position % size()); }
  const ShardUnit& unit(std::int64_t position) const { return units_[place(position)]; }

  std::vector<ShardUnit> units_;
  std::int64_t repeats_ = 1;
  std::vector<double> loads_;
  std::vector<double> rest_;              // seconds from each unit to the last one
  std::vector<std::int64_t> run_length_;  // of the run from each unit on, within one repeat
};

}  // namespace hydra
