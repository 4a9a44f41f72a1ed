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

  bool recording() const noexcept { return log_ != nullptr && log_->recording(); }
  /// The present time, or Time{} while the log is off.
  Time now() const noexcept { return log_ != nullptr ? log_->now() : Time{}; }

  /// Tells that job number `sequence` has moved `bytes` from `begin` to `end`. It had moved `before` bytes until then.
  void moved(std::int64_t sequence, const Job& job, Bytes before, Bytes bytes, Time begin, Time end) noexcept;
  void host_work(const ActivityLabel& label, Time begin) noexcept;
  void flush() noexcept;

 private:
  ActivityLog* const log_;
  std::int64_t sequence_ = 0;
  Activity open_{};
};

}  // namespace hydra
