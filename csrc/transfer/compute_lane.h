// The compute order of a simulated device in its asynchronous mode. One thread ends kernels late, in the order of
// their calls.
//
// A position is the number of kernels up to it. The lane knows which kernels have ended, and which of them were *seen*
// to have ended: by a thread that waited for a fence, or that reached() told so. Fences may outlive the lane. The
// destructor drains. Thread-safe. In a forked child no kernel ends, and no call waits.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "csrc/base/process.h"
#include "csrc/transfer/fence.h"

namespace hydra {

class FaultInjector;

class ComputeLane {
 public:
  using Position = std::int64_t;

  /// `faults` may be null.
  ComputeLane(double longest_delay_seconds, std::uint64_t seed, std::shared_ptr<FaultInjector> faults);
  ComputeLane(const ComputeLane&) = delete;
  ComputeLane& operator=(const ComputeLane&) = delete;
  ~ComputeLane();

  /// Runs `kernel`, which must not throw and may be empty, after a random delay. Returns its position.
  Position enqueue(std::function<void()> kernel);
  /// Returns a fence behind every kernel so far.
  FencePtr record();
  /// Blocks until every kernel so far has ended; they count as seen then.
  void drain() noexcept;
  /// The last position that a thread has seen reached.
  Position seen() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Kernel {
    std::function<void()> function;
    Clock::time_point not_before;
  };
  struct Progress;
  class PositionFence;

  void run() noexcept;

  const std::shared_ptr<Progress> progress_;
  const std::shared_ptr<FaultInjector> faults_;
  const HomeProcess home_;
  std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  std::deque<Kernel> queue_;
  Position enqueued_ = 0;
  bool stopping_ = false;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> delay_seconds_;
  HomeOnly<std::thread> thread_;
};

}  // namespace hydra
