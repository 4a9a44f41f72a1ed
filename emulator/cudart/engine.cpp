#include "emulator/cudart/engine.h"

#include <algorithm>
#include <iterator>

namespace emulated_cuda::cudart {

Busy Engine::reserve(Clock::time_point ready, Clock::duration duration) {
  Clock::time_point begin = ready;
  auto next = taken_.upper_bound(ready);
  if (next != taken_.begin()) {
    begin = std::max(begin, std::prev(next)->second);
  }
  for (; next != taken_.end() && next->first - begin < duration; ++next) {
    begin = std::max(begin, next->second);
  }
  const Clock::time_point end = begin + duration;
  if (duration > Clock::duration{}) {
    // Neighbours become one, so that a busy engine has few entries.
    Clock::time_point whole_begin = begin;
    Clock::time_point whole_end = end;
    if (next != taken_.end() && next->first == end) {
      whole_end = next->second;
      next = taken_.erase(next);
    }
    if (next != taken_.begin() && std::prev(next)->second == begin) {
      whole_begin = std::prev(next)->first;
    }
    taken_[whole_begin] = whole_end;
    busy_ += duration;
    last_ = std::max(last_, end);
  }
  return {.begin = begin, .end = end};
}

void Engine::forget(Clock::time_point before) {
  while (!taken_.empty() && taken_.begin()->second <= before) {
    taken_.erase(taken_.begin());
  }
}

}  // namespace emulated_cuda::cudart
