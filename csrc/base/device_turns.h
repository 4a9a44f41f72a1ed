// Turns of several runs on one device: exactly one of them goes on, and the others wait.
//
// Each run is a tenant. Its threads are the one that entered, and those that took over its seat (ThreadContext). A
// tenant has the turn from enter() to leave(), except while one of its threads waits for a lane, an update or a fence:
// these waits are inside a Pause. So between two pauses a run is alone with the state of the process, which the
// function `on_switch` exchanges. When a run arrives at a block it offers the turn to a tenant that ranks before it.
//
// Only tenants that have nothing to wait for rank at all, so what is resident counts first. Among them goes the one
// that has computed for the least time: it is bound by its link, which must not wait for compute, and the others fill
// its waits. The present one stays unless it is ahead by more than kAffinity.
//
// [Note: longest remaining time first] On several devices Sharded-LRTF (csrc/plan/units) runs a job first that decides
// when the last one ends. On one device there is none: every order that keeps compute and links busy ends equally
// early, and this rule keeps them busy without a forecast.
//
// Threads: any. Waits block without a lock of this class, and must not be made with the interpreter lock held.
// `on_switch` runs in the tenant that goes on, without a lock, and must not throw. Times are seconds.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/base/clock.h"

namespace hydra {

class DeviceTurns {
 public:
  using Tenant = std::size_t;
  /// Exchanges the state of the process: that of the tenant before, if there was one, for that of the tenant that goes
  /// on.
  using Switch = std::function<void(std::optional<Tenant> from, Tenant to)>;

  static constexpr double kAffinity = 0.002;

  explicit DeviceTurns(Switch on_switch) : on_switch_(std::move(on_switch)) {}
  DeviceTurns(const DeviceTurns&) = delete;
  DeviceTurns& operator=(const DeviceTurns&) = delete;

  Tenant admit();
  /// Makes the calling thread one of the tenant's, and waits for the turn. Throws StateError if the thread is a
  /// tenant's already. The object has to outlive the tenant's stay.
  void enter(Tenant tenant);
  /// Ends the stay of the calling thread's tenant, which has the turn.
  void leave();

  /// The seconds in which the tenant had the turn, without pauses.
  double computed(Tenant tenant) const;
  /// How often another tenant went on than the one before.
  std::int64_t switches() const;

  /// Threads for which `holds` is true keep the turn while they wait: they have a lock that every tenant needs, such as
  /// the interpreter's. Waits with it are wrong, and would last forever if the turn passed on.
  static void keep_turn_if(bool (*holds)()) noexcept;

  /// Lets a tenant go on that ranks before the calling thread's. Does nothing in other threads.
  static void offer();

  /// A thread's place with a tenant.
  struct Seat {
    DeviceTurns* turns = nullptr;
    Tenant tenant = 0;
    int undisturbed = 0;  // scopes in which the tenant keeps the turn while it waits
  };
  static Seat seat() noexcept;
  /// The calling thread becomes another one of the tenant's; only one of them runs at a time.
  static void take_over(const Seat& seat) noexcept;

 private:
  friend class Pause;

  struct State {
    std::condition_variable wake;
    double computed = 0;
    Clock::time_point since{};  // when it began to go on
  };

  void take(Tenant tenant) noexcept;
  void pass_on() noexcept;
  void pass_on_locked(std::optional<Tenant> next) noexcept;
  std::optional<Tenant> first_waiting() const noexcept;
  bool goes_before(Tenant one, Tenant other, double affinity) const noexcept;
  double computed_locked(Tenant tenant) const noexcept;
  /// Waits for the turn, and exchanges the state of the process.
  void await_locked(std::unique_lock<std::mutex>& lock, Tenant tenant);

  const Switch on_switch_;
  mutable std::mutex mutex_;
  std::deque<State> states_;  // by tenant; they stay in place
  std::vector<Tenant> waiting_;
  std::optional<Tenant> present_;
  std::optional<Tenant> last_;  // whose state the process has
  std::int64_t switches_ = 0;
};

/// A wait of the calling thread: other tenants may go on meanwhile.
class Pause {
 public:
  Pause() noexcept;
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  DeviceTurns::Seat seat_;
};

/// A scope in which the calling thread's tenant keeps the turn while it waits, because it holds what others may need.
class Undisturbed {
 public:
  Undisturbed() noexcept;
  ~Undisturbed();
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;
};

/// Waits for a condition under a lock, inside a pause.
template <class Ready>
void wait_in_pause(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const Ready& ready) {
  while (!ready()) {
    lock.unlock();
    {
      const Pause pause;
      lock.lock();
      changed.wait(lock, ready);
      lock.unlock();  // the turn may take long
    }
    lock.lock();
  }
}

}  // namespace hydra
