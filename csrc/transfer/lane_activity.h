// Writes one lane's entries to the activity log. Bytes of one job that move without another job's in between are one
// entry.
//
// An entry is logged when another job moves bytes, or at flush(), which the lane calls before the job's ticket ends.
// Not thread-safe: only the lane's thread that knows when bytes moved uses it.
#pragma once

#include "csrc/transfer/lane.h"

namespace hydra {

class LaneActivity {
 public:
  using Time = Activity::Time;

  /// `log` may be null, and has to outlive this.
  LaneActivity(ActivityLog* log, ActivityRow row) noexcept : log_(log) { open_.row = row; }

  /// The present time, or Time{} while the job's log is off.
  Time now(const Job& job) const noexcept {
    const ActivityLog* const log = log_of(job);
    return log != nullptr ? log->now() : Time{};
  }

  /// Tells that job number `sequence` has moved `bytes` from `begin` to `end`. It had moved `before` bytes until then.
  void moved(std::int64_t sequence, const Job& job, Bytes before, Bytes bytes, Time begin, Time end) noexcept;
  void host_work(const Job& job, Time begin) noexcept;
  void flush() noexcept;

 private:
  ActivityLog* log_of(const Job& job) const noexcept { return job.log != nullptr ? job.log : log_; }

  ActivityLog* const log_;
  ActivityLog* open_log_ = nullptr;
  std::int64_t sequence_ = 0;
  Activity open_{};
};

}  // namespace hydra
