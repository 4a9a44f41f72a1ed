#include "csrc/base/activity.h"

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

void ActivityLog::start(std::size_t room) {
  const std::lock_guard lock(mutex_);
  HYDRA_EXPECT(!recording_, StateError, "this run is already recording a trace; end it before the next one");
  ActivityRecord fresh;
  fresh.activities.reserve(room);
  fresh.memory.reserve(room);
  threads_.clear();
  threads_.reserve(kThreads);
  fresh.begin = Clock::now();
  record_ = std::move(fresh);
  room_ = room;
  recording_ = true;
}

ActivityRecord ActivityLog::stop() {
  const std::lock_guard lock(mutex_);
  HYDRA_EXPECT(recording_, StateError, "this run is not recording a trace");
  recording_ = false;
  record_.end = Clock::now();
  return std::exchange(record_, {});
}

void ActivityLog::add(const Activity& activity) noexcept { record(activity, std::this_thread::get_id()); }

void ActivityLog::record(Activity activity, std::thread::id thread) noexcept {
  if (activity.begin == Time{} || !recording() || !home_.here()) {
    return;
  }
  activity.pass = pass_.load(std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  if (!recording_) {
    return;
  }
  if (record_.activities.size() >= room_) {
    ++record_.dropped;
    return;
  }
  if (activity.row == ActivityRow::kCompute) {
    activity.thread = thread_locked(thread);
  }
  activity.begin = std::max(activity.begin, record_.begin);  // the activity may have begun in an earlier recording
  activity.end = std::max(activity.end, activity.begin);
  record_.activities.push_back(activity);
}

void ActivityLog::add_since(Time begin, ActivityRow row, ActivityKind kind, ActivityLabel label, Bytes bytes) noexcept {
  if (begin != Time{}) {
    add({.row = row, .kind = kind, .label = label, .bytes = bytes, .begin = begin, .end = Clock::now()});
  }
}

void ActivityLog::add(const MemoryMoment& moment) noexcept {
  if (!recording() || !home_.here()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (!recording_) {
    return;
  }
  if (record_.memory.size() >= room_) {
    ++record_.dropped;
    return;
  }
  record_.memory.push_back(moment);
}

std::int32_t ActivityLog::thread_locked(std::thread::id id) noexcept {
  const auto known = std::find(threads_.begin(), threads_.end(), id);
  if (known == threads_.end() && threads_.size() < kThreads) {
    threads_.push_back(id);  // start() has reserved the room
    return static_cast<std::int32_t>(threads_.size()) - 1;
  }
  return static_cast<std::int32_t>(std::min<std::ptrdiff_t>(known - threads_.begin(), kThreads - 1));
}

void ActivityLog::begin_pass(PassKind kind) noexcept {
  pass_begin_ = now();
  pass_thread_ = std::this_thread::get_id();
  pass_.store({.kind = kind, .number = ++passes_}, std::memory_order_relaxed);
}

void ActivityLog::end_pass() noexcept {
  const Time begin = std::exchange(pass_begin_, {});
  if (begin != Time{}) {
    record({.row = ActivityRow::kCompute, .kind = ActivityKind::kPass, .begin = begin, .end = Clock::now()},
           pass_thread_);
  }
  pass_.store({}, std::memory_order_relaxed);
}

}  // namespace hydra
