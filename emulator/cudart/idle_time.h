// What a unit has waited for when it had nothing to do.
//
// An operation may take a gap that was noted before: it then was no gap. Times before `forget` do not change any more.
// Not thread-safe.
#pragma once

#include <array>
#include <list>

#include "emulator/cudart/control.h"
#include "emulator/cudart/engine.h"

namespace emulated_cuda::cudart {

class IdleTime {
 public:
  /// The unit had nothing to do from `begin` to `end`, and waited for `unit`.
  void note(Clock::time_point begin, Clock::time_point end, Unit unit);
  /// An operation runs there.
  void fill(const Busy& busy);
  void forget(Clock::time_point before);
  /// Seconds, by what was waited for.
  std::array<double, kUnits> totals() const;

 private:
  struct Gap {
    Clock::time_point begin;
    Clock::time_point end;
    Unit unit;
  };

  std::list<Gap> gaps_;  // disjoint, in the order of time
  std::array<double, kUnits> forgotten_{};
};

}  // namespace emulated_cuda::cudart
