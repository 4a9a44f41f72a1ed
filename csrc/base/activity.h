// Records what lanes, compute threads and optimizer threads did, and when. The trace of a step is written from it.
//
// The log is off until start(), which allocates room for all entries. Entries beyond that room are only counted.
// While the log is off, an entry costs one relaxed load. Recording never throws and never allocates.
// All times are of one steady clock. Names are not copied: their owner keeps them as long as the record may be read.
// Threads: any. Calls of begin_pass() and end_pass() must not overlap. A forked child records nothing.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/base/types.h"

namespace hydra {

enum class ActivityRow : std::uint8_t { kCompute, kToDevice, kToHost, kOptimizer };

enum class ActivityKind : std::uint8_t {
  kPass,              // a window, from its opening to its close
  kBlock,             // compute in a block: a call of its module; in backwards and rounds, until the next block
  kCopy,              // bytes of one job that moved without another job's in between
  kHostWork,          // a lane ran a job's own functions: waits for an update, casts, sums
  kUpdate,            // the optimizer's threads updated a block
  kWaitForWeights,    // compute waited for a block that a hook announced
  kWaitForFault,      // compute waited for a block that an operation met absent
  kWaitForRoom,       // a block waited for the fill or write-back of another block, which can be evicted after it
  kWaitForGradients,  // the host waited for gradients to arrive
  kWaitForTransfers,  // the end of a pass waited for transfers under way
  kWaitForUpdate,     // the caller waited for the optimizer's threads
};

/// The subject of an activity: a block, or a named part of a block.
struct ActivityLabel {
  std::int32_t block = -1;  // -1: no block
  std::string_view part{};
};

struct PassNumber {
  PassKind kind = PassKind::kForward;
  std::int32_t number = 0;  // from 1 on; 0: between passes
};

struct Activity {
  using Time = std::chrono::steady_clock::time_point;

  ActivityRow row = ActivityRow::kCompute;
  ActivityKind kind = ActivityKind::kBlock;
  bool continued = false;  // this copy goes on after an interruption by another job's copy
  ActivityLabel label{};
  Bytes bytes = 0;
  Time begin{};
  Time end{};
  // The log sets these.
  PassNumber pass{};
  std::int32_t thread = 0;  // index of the compute thread, in the order of their first activity
};

/// Device bytes in use at one moment, by class.
struct MemoryMoment {
  static constexpr std::size_t kClasses = 5;
  Activity::Time time{};
  std::array<Bytes, kClasses> bytes{};
};

struct ActivityRecord {
  std::vector<Activity> activities;
  std::vector<MemoryMoment> memory;
  std::int64_t dropped = 0;
  Activity::Time begin{};
  Activity::Time end{};
};

class ActivityLog {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Activity::Time;
  static constexpr std::size_t kThreads = 64;  // further threads count as the last one

  ActivityLog() = default;
  ActivityLog(const ActivityLog&) = delete;
  ActivityLog& operator=(const ActivityLog&) = delete;

  /// Turns the log on, with room for `room` activities and as many memory moments. Throws StateError if it is on.
  void start(std::size_t room);
  /// Turns the log off and returns the record since start(). Throws StateError if the log is off.
  ActivityRecord stop();
  bool recording() const noexcept { return recording_.load(std::memory_order_relaxed); }

  /// Returns the present time, or Time{} while the log is off.
  Time now() const noexcept { return recording() ? Clock::now() : Time{}; }
  /// Adds an activity. Does nothing if the log is off, or if the activity began at Time{}.
  void add(const Activity& activity) noexcept;
  /// Adds an activity that lasted from `begin` up to now.
  void add_since(Time begin, ActivityRow row, ActivityKind kind, ActivityLabel label = {}, Bytes bytes = 0) noexcept;
  void add(const MemoryMoment& moment) noexcept;

  /// Activities added from now on belong to this pass. The pass itself is an activity of the calling thread.
  void begin_pass(PassKind kind) noexcept;
  void end_pass() noexcept;

 private:
  std::int32_t thread_locked(std::thread::id id) noexcept;
  void record(Activity activity, std::thread::id thread) noexcept;

  const HomeProcess home_;
  std::atomic<bool> recording_{false};
  std::atomic<PassNumber> pass_{PassNumber{}};
  std::int32_t passes_ = 0;
  Time pass_begin_{};
  std::thread::id pass_thread_;

  std::mutex mutex_;
  std::size_t room_ = 0;
  ActivityRecord record_;
  std::vector<std::thread::id> threads_;
};

/// Records its own lifetime as an activity.
class ActivityRange {
 public:
  ActivityRange(ActivityLog& log, ActivityRow row, ActivityKind kind, ActivityLabel label = {}) noexcept
      : log_(log), begin_(log.now()), row_(row), kind_(kind), label_(label) {}
  ~ActivityRange() { log_.add_since(begin_, row_, kind_, label_); }
  ActivityRange(const ActivityRange&) = delete;
  ActivityRange& operator=(const ActivityRange&) = delete;

 private:
  ActivityLog& log_;
  const ActivityLog::Time begin_;
  const ActivityRow row_;
  const ActivityKind kind_;
  const ActivityLabel label_;
};

}  // namespace hydra
