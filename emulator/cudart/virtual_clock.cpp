#include "emulator/cudart/virtual_clock.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <memory>

#include "emulator/cudart/quiet_process.h"

namespace emulated_cuda::cudart {

namespace {

constexpr std::chrono::microseconds kBetweenLooks{50};

std::int64_t processor_time(clockid_t clock) noexcept {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

double seconds_of(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

thread_local int t_pauses = 0;

}  // namespace

Pause::Pause() noexcept {
  if (t_pauses++ == 0 && VirtualClock::get().runs()) {
    ::pthread_getcpuclockid(::pthread_self(), &clock_);
    VirtualClock::get().begin(*this);
  }
}

Pause::~Pause() {
  --t_pauses;
  if (begin_ >= 0) {
    VirtualClock::get().end(*this);
  }
}

VirtualClock& VirtualClock::get() {
  static VirtualClock& clock = *std::make_unique<VirtualClock>().release();  // outlives all threads
  return clock;
}

void VirtualClock::start(const Speeds& speeds) {
  stop();
  speeds_ = speeds;
  engines_ = {};
  jumps_.clear();
  report_ = {};
  excluded_ = 0;
  added_ = 0;
  latest_ = 0;
  base_ = Clock::now().time_since_epoch().count() - processor_time(CLOCK_PROCESS_CPUTIME_ID);
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

Clock::time_point VirtualClock::now() noexcept {
  const std::int64_t paused = excluded();  // read first: host time is a little late, but never stays ahead
  std::int64_t time = base_ + processor_time(CLOCK_PROCESS_CPUTIME_ID) - paused + added_;
  std::int64_t latest = latest_;
  while (latest < time && !latest_.compare_exchange_weak(latest, time)) {
  }
  time = std::max(time, latest);
  return Clock::time_point(Clock::duration(time));
}

std::int64_t VirtualClock::excluded() noexcept {
  const std::lock_guard lock(pauses_mutex_);
  std::int64_t sum = excluded_;
  for (const Pause* const pause : pauses_) {
    sum += processor_time(pause->clock_) - pause->begin_;
  }
  return sum;
}

void VirtualClock::begin(Pause& pause) noexcept {
  const std::lock_guard lock(pauses_mutex_);
  pause.begin_ = processor_time(pause.clock_);
  pauses_.push_back(&pause);
}

void VirtualClock::end(Pause& pause) noexcept {
  const std::lock_guard lock(pauses_mutex_);
  pauses_.remove(&pause);
  excluded_ += processor_time(pause.clock_) - pause.begin_;
}

void VirtualClock::charge(double seconds) noexcept { added_ += duration_of(seconds).count(); }

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
  if (unit == Unit::kProcessors && last != Clock::time_point{} && busy.begin > last) {
    note_gap_locked(last, busy.begin, ready);
  }
  engine.forget(std::min(now(), busy.begin));
  return busy;
}

void VirtualClock::use_host_memory(std::int64_t bytes) {
  const double seconds = static_cast<double>(bytes) / speeds_.host_memory;
  const Busy busy = run(Unit::kHostMemory, {.enqueued = now(), .stream = {}}, seconds);
  wait_until(busy.end, Unit::kHostMemory);
}

ClockReport VirtualClock::report() {
  const std::lock_guard lock(mutex_);
  for (std::size_t unit = 0; unit < engines_.size(); ++unit) {
    report_.busy.at(unit) = seconds_of(engines_.at(unit).busy());
  }
  report_.seconds = seconds_of(now().time_since_epoch());
  return report_;
}

// ---- what the processors wait for -----------------------------------------------------------------------------------

void VirtualClock::note_gap_locked(Clock::time_point begin, Clock::time_point end, const Ready& ready) {
  const Clock::time_point late = std::clamp(ready.enqueued, begin, end);
  waited(ready.held_by) += seconds_of(end - late);  // it was enqueued, and waited for an event
  double of_host = seconds_of(late - begin);
  while (!jumps_.empty() && jumps_.front().end <= begin) {
    jumps_.pop_front();
  }
  for (const Jump& jump : jumps_) {
    const Clock::duration shared = std::min(jump.end, late) - std::max(jump.begin, begin);
    if (shared > Clock::duration{}) {
      waited(jump.unit) += seconds_of(shared);
      of_host -= seconds_of(shared);
    }
  }
  waited(Unit::kNone) += of_host;
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
    added_ += (to - from).count();
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
  return (clock.runs() ? clock.now() : Clock::now()).time_since_epoch().count();
}
