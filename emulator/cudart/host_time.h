// Host time of the virtual clock: what the program's threads really compute, without the emulator's own work.
//
// A thread belongs to the program from count_this_thread() on: the one that starts the clock, and each that launches a
// kernel. These run in turns, so their processor times add up. All other threads, of lanes and of the host's optimizer,
// are taken to have processors of their own: their time does not count. `Pause` takes the emulator's work in a
// program's thread out of its time, and with it what a pause itself costs, as measured by start(). Charges and jumps
// add to it.
//
// Thread-safe, except start(), which no other thread may use the clock beside. Nanoseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <list>
#include <shared_mutex>

namespace emulated_cuda::cudart {

class HostTime {
 public:
  /// The one host time, which stands until start().
  static HostTime& get();

  /// Begins anew at `now`, with the calling thread as the program's only one.
  void start(std::int64_t now);
  void count_this_thread();
  std::int64_t now() noexcept;
  /// Adds time in which every thread waits.
  void jump(std::int64_t time) noexcept { added_ += time; }
  /// Adds time that the calling thread takes, if it counts.
  void charge(std::int64_t time) noexcept;

 private:
  friend class Pause;

  /// One thread that has used the emulator.
  struct Account {
    explicit Account(HostTime& of);
    ~Account();
    Account(const Account&) = delete;
    Account& operator=(const Account&) = delete;

    bool counts() const noexcept { return epoch != 0 && epoch == owner.epoch_; }
    /// Its time that counts. Never more than at the moment of the call.
    std::int64_t counted() const noexcept;

    HostTime& owner;
    clockid_t clock{};
    std::atomic<std::int64_t> epoch{0};   // of the start since which it counts; 0 if it does not
    std::atomic<std::int64_t> begin{0};   // its processor time when it began to count
    std::atomic<std::int64_t> paused{0};  // since then
    std::atomic<std::int64_t> pause{-1};  // its processor time when the pause under way began
    int pauses = 0;                       // nested
  };
  /// The calling thread's. One that is asked for while the thread ends stays for good, and never counts.
  static Account& account();

  std::int64_t cost_of_pause();

  std::atomic<std::int64_t> epoch_{0};
  std::atomic<std::int64_t> base_{0};
  std::atomic<std::int64_t> added_{0};
  std::atomic<std::int64_t> latest_{0};
  std::atomic<std::int64_t> ended_{0};  // of threads that have ended
  std::atomic<std::int64_t> cost_{0};   // of a pause, beyond what it takes out
  std::shared_mutex mutex_;             // of the list
  std::list<const Account*> accounts_;
};

/// The calling thread's processor time in this scope is the emulator's, and no part of host time.
class Pause {
 public:
  Pause() noexcept;
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  HostTime::Account& account_;
};

}  // namespace emulated_cuda::cudart
