// The clock of an emulation in which nothing is computed: what each unit of the machine would take, and a host time
// that grows by what this process really computes.
//
// Host time is one for all threads: the processor time of the process, without that of the emulator, and with a charge
// for each call of the runtime. So threads that would run side by side are counted one behind the other, and a host
// looks slower than it is. When every thread waits, host time jumps to the earliest point that one waits for.
// `Pause` takes the emulator's own work out of host time. Thread-safe, except start() and stop(), which no other thread
// may use the machine beside. Durations are steady_clock's; time points are virtual once the clock runs.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <deque>
#include <list>
#include <mutex>
#include <thread>

#include "emulator/cudart/control.h"
#include "emulator/cudart/engine.h"

namespace emulated_cuda::cudart {

/// When an operation may begin.
struct Ready {
  Clock::time_point enqueued;
  Clock::time_point stream;          // when its stream is free
  Unit held_by = Unit::kProcessors;  // what the stream waits for until then
};

class Pause;

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
  /// Adds to host time.
  void charge(double seconds) noexcept;
  /// Takes the processor time of a pause out of host time, while it lasts and afterwards.
  void begin(Pause& pause) noexcept;
  void end(Pause& pause) noexcept;
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
  std::int64_t excluded() noexcept;
  bool wake_due_locked();
  void jump_locked();
  void note_gap_locked(Clock::time_point begin, Clock::time_point end, const Ready& ready);
  double& waited(Unit unit) { return report_.waited.at(static_cast<std::size_t>(unit)); }

  Speeds speeds_;
  std::atomic<bool> runs_{false};
  // Nanoseconds.
  std::atomic<std::int64_t> base_{0};
  std::atomic<std::int64_t> added_{0};
  std::atomic<std::int64_t> latest_{0};

  std::mutex pauses_mutex_;  // of the next two; taken last
  std::int64_t excluded_ = 0;
  std::list<const Pause*> pauses_;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::list<Waiter*> waiters_;
  std::array<Engine, kUnits> engines_;
  std::deque<Jump> jumps_;
  ClockReport report_;
  std::thread pacer_;
};

/// The calling thread's processor time in this scope is the emulator's, and no part of host time.
class Pause {
 public:
  Pause() noexcept;
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  friend class VirtualClock;

  clockid_t clock_{};  // the thread's
  std::int64_t begin_ = -1;
};

}  // namespace emulated_cuda::cudart
