#include "csrc/transfer/lane_activity.h"

namespace hydra {

namespace {

/// Shorter host work is not logged: most functions of jobs do nothing, and would fill the log.
constexpr std::chrono::microseconds kShortestHostWork{10};

}  // namespace

void LaneActivity::moved(std::int64_t sequence, const Job& job, Bytes before, Bytes bytes, Time begin,
                         Time end) noexcept {
  if (begin == Time{}) {
    return;
  }
  if (sequence != sequence_) {
    flush();
    sequence_ = sequence;
    open_log_ = log_of(job);
    open_.kind = ActivityKind::kCopy;
    open_.label = job.label;
    open_.continued = before > 0;
    open_.begin = begin;
  }
  open_.bytes += bytes;
  open_.end = end;
}

void LaneActivity::host_work(const Job& job, Time begin) noexcept {
  if (begin != Time{} && ActivityLog::Clock::now() - begin >= kShortestHostWork) {
    log_of(job)->add_since(begin, open_.row, ActivityKind::kHostWork, job.label);
  }
}

void LaneActivity::flush() noexcept {
  if (open_.bytes > 0) {
    open_log_->add(open_);
  }
  open_.bytes = 0;
  sequence_ = 0;
}

}  // namespace hydra
