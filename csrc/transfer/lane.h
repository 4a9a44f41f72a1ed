// One direction of transfer, served in order within a priority class.
//
// A job moves segments in pieces. Pieces are so small that a more urgent job can run between two of them.
// A job runs `before`, then `locate`, waits for the fences, moves the pieces, and runs `after`. The functions run on
// the lane's own host thread, outside every lock of the core. They cast into staging, or add to a host gradient.
// An exception from one of them fails the ticket, as a failed copy does. The job's later steps are left out, and
// the lane goes on with the next job.
// Sources and destinations have to live until the ticket has finished. The job may own them through its functions,
// which are destroyed before the ticket ends. Sizes are bytes, times are seconds. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "csrc/base/activity.h"
#include "csrc/base/types.h"
#include "csrc/transfer/fence.h"
#include "csrc/transfer/ticket.h"

namespace hydra {

/// The priority classes, most urgent first.
enum class Priority : std::uint8_t { kFault, kGradient, kPrefetch };

struct Segment {
  void* destination = nullptr;
  const void* source = nullptr;
  Bytes bytes = 0;
};

struct Job {
  std::vector<Segment> segments;
  Priority priority = Priority::kPrefetch;
  /// Names the bytes in the activity log.
  ActivityLabel label{};
  /// The log of the job's activities, which has to outlive it; null for that of the lane's device.
  ActivityLog* log = nullptr;
  /// The lane waits for these before the first byte moves. Null entries are allowed.
  std::vector<FencePtr> fences;
  std::function<void()> before;
  /// Fills in addresses that were unknown, and null, at submission. Must not change the number of bytes.
  std::function<void(std::vector<Segment>&)> locate;
  std::function<void()> after;

  Bytes bytes() const noexcept {
    Bytes sum = 0;
    for (const Segment& segment : segments) {
      sum += segment.bytes;
    }
    return sum;
  }
};

/// Throws StateError if a segment lacks a valid size or, without `locate`, its source or destination.
void expect_memory(const Job& job);
/// Runs `before` and `locate`. Throws their errors, and StateError if an address is still missing.
void prepare_job(Job& job);

/// Counted where the bytes are copied. `jobs` counts jobs that have ended, including failed ones. `busy_seconds` is
/// the time in which bytes moved.
struct LaneStatistics {
  Bytes bytes = 0;
  std::int64_t jobs = 0;
  std::int64_t failures = 0;
  double busy_seconds = 0.0;
};

class Lane {
 public:
  Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  /// Drains.
  virtual ~Lane() = default;

  /// Submits a job without waiting for its transfer. Throws StateError for a segment without memory, in a forked child,
  /// and while the lane is being destroyed, when a job's function may still call it. In a forked child the other calls
  /// do nothing.
  virtual TicketPtr submit(Job job) = 0;
  /// Blocks until all jobs submitted before this call have finished or failed. A job's function must not call it.
  virtual void drain() noexcept = 0;
  virtual LaneStatistics statistics() const noexcept = 0;
  /// The most jobs of one priority that can be between their first byte and the end of `after` at the same time. They
  /// end in the order of submission.
  virtual std::size_t in_flight() const noexcept { return 1; }
};

}  // namespace hydra
