// The clock that measures all durations: steady; durations are seconds.
#pragma once

#include <chrono>

namespace hydra {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace hydra
