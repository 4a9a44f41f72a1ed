// A stream: a thread that runs operations in order, each after a delay. An event, and the points that its recordings
// leave in streams.
//
// Under the virtual clock no operation is run: each ends when the clock says so, and its thread sleeps.
// A stream whose device has failed drops its operations; their points count as reached, so every wait ends. An
// operation that already runs goes on to its end. The destructor runs what is left, and joins the thread. The thread
// holds the key of device memory, and blocks all signals but those of faults. Thread-safe. Times are seconds, unless
// they are clock points.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "emulator/cudart/control.h"

namespace emulated_cuda::cudart {

inline constexpr int kLeastPriority = 0;
inline constexpr int kGreatestPriority = -5;

using Clock = std::chrono::steady_clock;
using Fault = std::atomic<cudaError_t>;

/// What an operation takes under the virtual clock, where it is not run.
struct Task {
  Unit unit = Unit::kNone;
  double seconds = 0.0;

  static Task of(const KernelWork& work);
};

/// A place in the order of a stream.
class Point {
 public:
  void reach() noexcept;
  /// Under the virtual clock: reached then. `unit` is what a waiting host waits for.
  void reach_at(Clock::time_point time, Unit unit) noexcept;
  Unit unit() const noexcept;
  bool reached() const noexcept;
  Clock::time_point time() const noexcept;
  /// Ends for certain: a failed device counts its points as reached.
  void wait() const noexcept;
  /// Also ends when the waiting stream's own device fails; wake() has it look.
  void wait(const Fault& fault) const noexcept;
  void wake() noexcept;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
  bool in_time_ = false;
  Unit unit_ = Unit::kNone;
  Clock::time_point time_;
};

using PointPtr = std::shared_ptr<Point>;

class Event {
 public:
  Event(int device, bool timed) noexcept : device_(device), timed_(timed) {}

  int device() const noexcept { return device_; }
  bool timed() const noexcept { return timed_; }
  /// The latest recording; null if there is none.
  PointPtr latest() const;
  void set_latest(PointPtr point);

 private:
  const int device_;
  const bool timed_;
  mutable std::mutex mutex_;
  PointPtr latest_;
};

/// The delays of a stream's operations: they follow from the seed and the number of the stream. Not thread-safe.
class Delays {
 public:
  void set(double longest_seconds, std::uint64_t seed, int number);
  Clock::duration next();

 private:
  double longest_seconds_ = 0.0;
  std::mt19937_64 random_;
};

class Stream {
 public:
  using Work = std::function<void()>;

  /// `fault` is that of the device, and outlives the stream. `number` makes the delays differ between streams.
  Stream(int device, int number, int priority, const Fault& fault);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const noexcept { return device_; }
  int number() const noexcept { return number_; }
  int priority() const noexcept { return priority_; }
  /// Whether a capture is under way, for the machine.
  std::atomic<bool>& capturing() noexcept { return capturing_; }

  void set_delays(double longest_seconds, std::uint64_t seed);

  /// The point is reached when the operation has run, or was dropped.
  PointPtr push(Work work, const Task& task = {});
  /// A point behind all operations so far; an operation itself.
  PointPtr mark();
  /// Later operations wait for the point.
  void follow(PointPtr point);
  /// Waits for the operations so far, or for the device to fail.
  void wait();
  bool idle() const;
  /// Waits until nothing runs, even if the device has failed.
  void drain() const;
  /// Drops what waits. The caller has set the fault.
  void drop() noexcept;

 private:
  struct Operation {
    Work work;
    PointPtr point;
    Clock::duration delay{};
  };

  PointPtr enqueue(Work work, bool delayed);
  PointPtr enqueue_in_time(const Task& task);
  void run() noexcept;
  void perform(Operation& operation);
  void finish(const Operation& operation) noexcept;

  const int device_;
  const int number_;
  const int priority_;
  const Fault& fault_;
  std::atomic<bool> capturing_{false};

  mutable std::mutex mutex_;
  std::condition_variable work_;
  mutable std::condition_variable ended_;
  std::deque<Operation> queue_;
  std::uint64_t unfinished_ = 0;
  PointPtr followed_;  // what the thread waits for now
  bool stopping_ = false;
  // Under the virtual clock: when the operations so far have ended, and which unit the last of them is of.
  Clock::time_point free_;
  Unit held_by_ = Unit::kProcessors;
  Delays delays_;
  std::thread thread_;
};

/// Whether the calling thread is a stream's.
bool in_stream_thread() noexcept;

}  // namespace emulated_cuda::cudart
