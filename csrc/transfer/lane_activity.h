// One lane's entries in the activity log: what a job moves with no other job's bytes in between is one entry.
//
// An entry is in the log once another job moves bytes, or the job has ended (flush()): before its ticket ends.
// Not thread-safe: for the thread of the lane that knows when bytes moved.
#pragma once

#include "csrc/transfer/lane.h"

namespace hydra {

class LaneActivity {
 public:
  using Time = Activity::Time;

  /// `log` may be null, and has to outlive this.
  LaneActivity(ActivityLog* log, ActivityRow row) noexcept : log_(log) { open_.row = row; }

  bool recording() const noexcept { return log_ != nullptr && log_->recording(); }
  /// Now, or no time while nothing is recorded.
  Time now() const noexcept { return log_ != nullptr ? log_->now() : Time{}; }

  /// The `sequence`-th job has moved `bytes` since `begin`; `before` is what it had moved until then.
  void moved(std::int64_t sequence, const Job& job, Bytes before, Bytes bytes, Time begin, Time end) noexcept;
  void host_work(const ActivityLabel& label, Time begin) noexcept;
  void flush() noexcept;

 private:
  ActivityLog* const log_;
  std::int64_t sequence_ = 0;
  Activity open_{};
};

}  // namespace hydra
