#include "emulator/cudart/idle_time.h"

#include <algorithm>
#include <chrono>

namespace emulated_cuda::cudart {

namespace {

void add(std::array<double, kUnits>& totals, Unit unit, Clock::duration duration) {
  totals.at(static_cast<std::size_t>(unit)) += std::chrono::duration<double>(duration).count();
}

}  // namespace

void IdleTime::note(Clock::time_point begin, Clock::time_point end, Unit unit) {
  if (begin < end) {
    gaps_.push_back({.begin = begin, .end = end, .unit = unit});
  }
}

void IdleTime::fill(const Busy& busy) {
  for (auto gap = gaps_.begin(); gap != gaps_.end() && gap->begin < busy.end;) {
    const Gap whole = *gap;
    if (whole.end <= busy.begin) {
      ++gap;
      continue;
    }
    gap = gaps_.erase(gap);
    if (whole.begin < busy.begin) {
      gaps_.insert(gap, {.begin = whole.begin, .end = busy.begin, .unit = whole.unit});
    }
    if (busy.end < whole.end) {
      gaps_.insert(gap, {.begin = busy.end, .end = whole.end, .unit = whole.unit});
    }
  }
}

void IdleTime::forget(Clock::time_point before) {
  while (!gaps_.empty() && gaps_.front().end <= before) {
    add(forgotten_, gaps_.front().unit, gaps_.front().end - gaps_.front().begin);
    gaps_.pop_front();
  }
}

std::array<double, kUnits> IdleTime::totals() const {
  std::array<double, kUnits> totals = forgotten_;
  for (const Gap& gap : gaps_) {
    add(totals, gap.unit, gap.end - gap.begin);
  }
  return totals;
}

}  // namespace emulated_cuda::cudart
