#include "csrc/transfer/simulated_lane.h"

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "csrc/base/clock.h"

namespace hydra {
namespace {

/// Rounds up, so that no piece ends early.
Clock::duration ticks(double seconds) {
  return std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

SimulatedLane::SimulatedLane(Link link, SimulatedMemory& memory, ActivityLog& log)
    : WorkerLane(&log, link.direction == Direction::kToDevice ? ActivityRow::kToDevice : ActivityRow::kToHost),
      link_(std::move(link)),
      memory_(memory) {
  start();
}

SimulatedLane::~SimulatedLane() { stop(); }

void SimulatedLane::on_thread_start() {
#ifdef __linux__
  // By default the kernel may end sleeps 50 us late to save power, which is the time for half a megabyte.
  ::prctl(PR_SET_TIMERSLACK, 1UL);
#endif
}

void SimulatedLane::begin(Job& job) {
  Clock::time_point ready = runnable_since();
  if (link_.faults) {
    link_.faults->before_job(link_.direction);
    ready = Clock::now();
  }
  for (const FencePtr& fence : job.fences) {
    if (fence != nullptr && !fence->reached()) {
      fence->wait();
      ready = Clock::now();
    }
  }
  link_free_ = std::max(link_free_, ready) + ticks(link_.latency_seconds);
  if (link_.latency_seconds > 0.0) {
    std::this_thread::sleep_until(link_free_);
  }
}

double SimulatedLane::move(const Segment& piece) {
  look_for_hazards(piece);
  const Clock::time_point begin = Clock::now();
  {
    const std::shared_lock lock(memory_.content);
    std::memcpy(piece.destination, piece.source, static_cast<std::size_t>(piece.bytes));
  }
  double seconds = seconds_since(begin);
  if (link_.bytes_per_second > 0.0) {
    seconds = std::max(seconds, static_cast<double>(piece.bytes) / link_.bytes_per_second);
  }
  link_free_ = std::max(link_free_, runnable_since()) + ticks(seconds);
  std::this_thread::sleep_until(link_free_);
  return seconds;
}

void SimulatedLane::look_for_hazards(const Segment& piece) {
  if (memory_.compute == nullptr) {
    return;
  }
  const ComputeLane::Position seen = memory_.compute->seen();
  if (link_.direction == Direction::kToDevice) {
    memory_.hazards.copy_overwrites(piece.destination, piece.bytes, seen);
  } else {
    memory_.hazards.copy_reads(piece.source, piece.bytes, seen);
  }
}

}  // namespace hydra
