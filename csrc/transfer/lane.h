// One direction of transfer, served in order within a priority class.
//
// A job moves segments, in pieces small enough that a more urgent job gets its turn between two of them.
// `before`, `locate`, then the wait for the fences, then the pieces, then `after`. The functions run on the
// lane's own host thread, outside every lock of the core: casts into staging, sums into a host gradient.
// An exception from one of them fails the ticket, as a failed copy does; what would have come later is left out,
// and the lane goes on with the next job.
// Source and destination have to live until the ticket has finished: the job may own them through its
// functions, which are destroyed before the ticket ends.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "csrc/base/activity.h"
#include "csrc/base/types.h"
#include "csrc/transfer/fence.h"
#include "csrc/transfer/ticket.h"

namespace hydra {

/// Served in this order.
enum class Priority : std::uint8_t { kFault, kGradient, kPrefetch };

struct Segment {
  void* destination = nullptr;
  const void* source = nullptr;
  Bytes bytes = 0;
};

struct Job {
  std::vector<Segment> segments;
  Priority priority = Priority::kPrefetch;
  /// What it moves, for the activity log.
  ActivityLabel label{};
  /// Reached before the first byte moves. Null entries are allowed.
  std::vector<FencePtr> fences;
  std::function<void()> before;
  /// Says where the bytes are, if that was not known: sources are null until then. As many bytes as before.
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

/// Throws StateError for a segment that lacks its destination or a valid size, or its source unless that is to be
/// located.
void expect_memory(const Job& job);
/// What has to run before the fences are waited for. Throws what it throws, and StateError for a source that is still
/// missing.
void prepare_job(Job& job);

/// Counted where the bytes are copied. `jobs` are those that ended, failed ones included; `busy_seconds` is
/// the time bytes were moving.
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

  /// Never blocks on the transfer itself. Throws StateError for a segment without memory, and once the lane
  /// is being destroyed (a job's function may still try), or in a forked child, where the other calls do nothing.
  virtual TicketPtr submit(Job job) = 0;
  /// Blocks until everything submitted before this call has finished, whatever the outcome. Never call it
  /// from a job's function.
  virtual void drain() noexcept = 0;
  virtual LaneStatistics statistics() const noexcept = 0;
  /// Jobs of one priority that may be between their first byte and the end of `after` at the same time, at most. They
  /// end in the order they were submitted in.
  virtual std::size_t in_flight() const noexcept { return 1; }
};

}  // namespace hydra
