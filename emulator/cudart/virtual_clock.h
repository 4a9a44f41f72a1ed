// The clock of an emulation in which nothing is computed: what each unit of the machine would take, and a host time
// that grows by what this process really computes.
//
// Host time is one for all threads: what the program's threads compute (host_time.h), with a charge for each of their
// calls of the runtime. When every thread waits, host time jumps to the earliest point that one waits for. Thread-safe,
// except start() and stop(), which no other thread may use the machine beside. Durations are steady_clock's; time
// points are virtual once the clock runs.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <mutex>
#include <thread>

#include "emulator/cudart/control.h"
#include "emulator/cudart/engine.h"
#include "emulator/cudart/host_time.h"
#include "emulator/cudart/idle_time.h"

namespace emulated_cuda::cudart {

/// When an operation may begin.
struct Ready {
  Clock::time_point enqueued;
  Clock::time_point stream;          // when its stream is free
  Unit held_by = Unit::kProcessors;  // what the stream waits for until then
};

class VirtualClock {
 public:
  /// The one clock, which stands until start().
  static VirtualClock& get();

  void start(const Speeds& speeds);
  /// Ends every wait.
  void stop();
  bool runs() const noexcept { return runs_.load(std::memory_order_relaxed); }
  const Speeds& speeds() const noexcept { return speeds_; }

  Clock::time_point now() noexcept;
  /// Adds to host time what the calling thread takes.
  void charge(double seconds) noexcept;
  /// Returns when host time has come there.
  void wait_until(Clock::time_point time, Unit unit);
  /// Puts an operation where a unit has time for it. An operation of no unit takes none.
  Busy run(Unit unit, const Ready& ready, double seconds);
  /// What the host's memory takes; waits for it.
  void use_host_memory(std::int64_t bytes);

  ClockReport report();

 private:
  struct Waiter {
    Clock::time_point time;
    Unit unit = Unit::kProcessors;
    bool woken = false;
    std::condition_variable changed{};
  };
  /// Host time that passed while every thread waited.
  struct Jump {
    Clock::time_point begin;
    Clock::time_point end;
    Unit unit = Unit::kProcessors;
  };

  void pace();
  bool wake_due_locked();
  void jump_locked();
  void note_gap_locked(Clock::time_point begin, Clock::time_point end, const Ready& ready);

  Speeds speeds_;
  std::atomic<bool> runs_{false};
  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::list<Waiter*> waiters_;
  std::array<Engine, kUnits> engines_;
  std::deque<Jump> jumps_;
  IdleTime idle_;  // of the processors
  std::thread pacer_;
};

}  // namespace emulated_cuda::cudart
