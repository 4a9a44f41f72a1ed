#include "emulator/cudart/virtual_clock.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "emulator/cudart/quiet_process.h"

namespace emulated_cuda::cudart {

namespace {

constexpr std::chrono::microseconds kBetweenLooks{50};

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

double seconds_of(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

VirtualClock& VirtualClock::get() {
  static VirtualClock& clock = *std::make_unique<VirtualClock>().release();  // outlives all threads
  return clock;
}

void VirtualClock::start(const Speeds& speeds) {
  stop();
  speeds_ = speeds;
  engines_ = {};
  jumps_.clear();
  idle_ = {};
  HostTime::get().start(Clock::now().time_since_epoch().count());
  runs_ = true;
  pacer_ = std::thread([this] { pace(); });
}

void VirtualClock::stop() {
  {
    const std::lock_guard lock(mutex_);
    runs_ = false;
    for (Waiter* const waiter : waiters_) {
      waiter->changed.notify_one();
    }
    changed_.notify_one();
  }
  if (pacer_.joinable()) {
    pacer_.join();
  }
}

Clock::time_point VirtualClock::now() noexcept { return Clock::time_point(Clock::duration(HostTime::get().now())); }

void VirtualClock::charge(double seconds) noexcept { HostTime::get().charge(duration_of(seconds).count()); }

void VirtualClock::wait_until(Clock::time_point time, Unit unit) {
  std::unique_lock lock(mutex_);
  if (!runs() || now() >= time) {
    return;
  }
  Waiter waiter{.time = time, .unit = unit};
  waiters_.push_back(&waiter);
  changed_.notify_one();
  waiter.changed.wait(lock, [&] { return waiter.woken || !runs(); });
  if (!waiter.woken) {
    waiters_.remove(&waiter);
  }
}

Busy VirtualClock::run(Unit unit, const Ready& ready, double seconds) {
  const Clock::time_point begin = std::max(ready.enqueued, ready.stream);
  if (unit == Unit::kNone) {
    return {.begin = begin, .end = begin};
  }
  const std::lock_guard lock(mutex_);
  Engine& engine = engines_.at(static_cast<std::size_t>(unit));
  const Clock::time_point last = engine.last();
  const Busy busy = engine.reserve(begin, duration_of(seconds));
  const Clock::time_point past = std::min(now(), busy.begin);
  engine.forget(past);
  if (unit == Unit::kProcessors) {
    if (last != Clock::time_point{} && busy.begin > last) {
      note_gap_locked(last, busy.begin, ready);
    } else {
      idle_.fill(busy);
    }
    idle_.forget(past);
  }
  return busy;
}

void VirtualClock::use_host_memory(std::int64_t bytes) {
  const double seconds = static_cast<double>(bytes) / speeds_.host_memory;
  const Busy busy = run(Unit::kHostMemory, {.enqueued = now(), .stream = {}}, seconds);
  wait_until(busy.end, Unit::kHostMemory);
}

ClockReport VirtualClock::report() {
  const std::lock_guard lock(mutex_);
  ClockReport report{.seconds = seconds_of(now().time_since_epoch()), .waited = idle_.totals()};
  for (std::size_t unit = 0; unit < engines_.size(); ++unit) {
    report.busy.at(unit) = seconds_of(engines_.at(unit).busy());
  }
  return report;
}

// ---- what the processors wait for -----------------------------------------------------------------------------------

void VirtualClock::note_gap_locked(Clock::time_point begin, Clock::time_point end, const Ready& ready) {
  const Clock::time_point late = std::clamp(ready.enqueued, begin, end);
  while (!jumps_.empty() && jumps_.front().end <= begin) {
    jumps_.pop_front();
  }
  Clock::time_point noted = begin;
  for (const Jump& jump : jumps_) {
    const Clock::time_point from = std::clamp(jump.begin, noted, late);
    const Clock::time_point to = std::clamp(jump.end, noted, late);
    idle_.note(noted, from, Unit::kNone);
    idle_.note(from, to, jump.unit);
    noted = to;
  }
  idle_.note(noted, late, Unit::kNone);
  idle_.note(late, end, ready.held_by);  // it was enqueued, and waited for an event
}

// ---- host time ------------------------------------------------------------------------------------------------------

void VirtualClock::pace() {
  const Pause pause;
  QuietProcess process;
  std::unique_lock lock(mutex_);
  while (runs()) {
    changed_.wait(lock, [this] { return !runs() || !waiters_.empty(); });
    if (!wake_due_locked()) {
      lock.unlock();
      const bool quiet = process.quiet();
      if (!quiet) {
        std::this_thread::sleep_for(kBetweenLooks);
      }
      lock.lock();
      if (quiet) {
        jump_locked();
      }
    }
  }
}

bool VirtualClock::wake_due_locked() {
  const Clock::time_point time = now();
  const std::size_t before = waiters_.size();
  waiters_.remove_if([time](Waiter* waiter) {
    if (waiter->time > time) {
      return false;
    }
    waiter->woken = true;
    waiter->changed.notify_one();
    return true;
  });
  return waiters_.size() != before;
}

void VirtualClock::jump_locked() {
  const auto earliest = std::ranges::min_element(waiters_, {}, [](const Waiter* waiter) { return waiter->time; });
  if (earliest == waiters_.end()) {
    return;
  }
  const Clock::time_point from = now();
  const Clock::time_point to = (*earliest)->time;
  if (to > from) {
    HostTime::get().jump((to - from).count());
    jumps_.push_back({.begin = from, .end = to, .unit = (*earliest)->unit});
  }
  wake_due_locked();
}

}  // namespace emulated_cuda::cudart

namespace emulated_cuda {

using cudart::VirtualClock;

void start_clock(const Speeds& speeds) { VirtualClock::get().start(speeds); }

void stop_clock() { VirtualClock::get().stop(); }

bool clock_runs() noexcept { return VirtualClock::get().runs(); }

ClockReport clock_report() { return VirtualClock::get().report(); }

void use_host_memory(std::int64_t bytes) noexcept { VirtualClock::get().use_host_memory(bytes); }

}  // namespace emulated_cuda

/// What an extension that is linked with `--wrap` calls in place of std::chrono::steady_clock::now(). It does not wait
/// until a time: a virtual one means nothing to the system.
extern "C" __attribute__((visibility("default"))) std::int64_t
__wrap__ZNSt6chrono3_V212steady_clock3nowEv() noexcept {  // NOLINT: the linker's name
  using emulated_cuda::cudart::Clock;
  using emulated_cuda::cudart::VirtualClock;
  VirtualClock& clock = VirtualClock::get();
  const emulated_cuda::cudart::Pause pause;
  return (clock.runs() ? clock.now() : Clock::now()).time_since_epoch().count();
}
