// What one unit of a machine does when, in virtual time: a card's processors, one direction of its link, the host's
// memory.
//
// An operation takes the first gap that is long enough after it is ready. So an operation that was enqueued early, but
// waits for long, does not hold back others. Busy time that ended before `forget` is forgotten. Not thread-safe.
#pragma once

#include <map>

#include "emulator/cudart/stream.h"

namespace emulated_cuda::cudart {

struct Busy {
  Clock::time_point begin;
  Clock::time_point end;
};

class Engine {
 public:
  Busy reserve(Clock::time_point ready, Clock::duration duration);
  void forget(Clock::time_point before);
  Clock::duration busy() const noexcept { return busy_; }
  /// The end of the latest operation.
  Clock::time_point last() const noexcept { return last_; }

 private:
  std::map<Clock::time_point, Clock::time_point> taken_;  // ends by begins; disjoint
  Clock::duration busy_{};
  Clock::time_point last_;
};

}  // namespace emulated_cuda::cudart
