// The clock that measures all durations: steady; durations are seconds.
#pragma once

#include <chrono>

namespace hydra {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Adds the time of a scope to its caller's total.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) noexcept : total_(total) {}
  ~Stopwatch() { total_ += seconds_since(start_); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  const Clock::time_point start_ = Clock::now();
};

}  // namespace hydra
