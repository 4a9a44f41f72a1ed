#include "csrc/optim/deferred_update.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "csrc/base/clock.h"
#include "csrc/base/device_turns.h"

namespace hydra {
namespace {

bool is_of(const DeferredUpdate::Part& part, std::int32_t block) {
  return std::find(part.blocks.begin(), part.blocks.end(), block) != part.blocks.end();
}

}  // namespace

DeferredUpdate::DeferredUpdate(std::vector<Part> parts, std::shared_ptr<ThreadPool> pool, float scale,
                               double bytes_per_second, ActivityLog* log)
    : pool_(std::move(pool)), scale_(scale), bytes_per_second_(bytes_per_second), log_(log) {
  for (Part& part : parts) {
    entries_.push_back({std::move(part), State::kWaiting});
  }
  thread_ = std::thread([this] { run(); });
}

std::shared_ptr<DeferredUpdate> DeferredUpdate::begin(std::vector<Part> parts, std::shared_ptr<ThreadPool> pool,
                                                      float scale, double bytes_per_second, ActivityLog* log) {
  auto update = std::make_unique<DeferredUpdate>(std::move(parts), std::move(pool), scale, bytes_per_second, log);
  return {update.release(), [](DeferredUpdate* const begun) {
            if (begun->home_.here()) {
              delete begun;
            }
          }};
}

DeferredUpdate::~DeferredUpdate() {
  if (thread_.joinable()) {
    thread_.join();
  }
}

DeferredUpdate::Entry* DeferredUpdate::next_locked() {
  Entry* next = nullptr;
  for (Entry& entry : entries_) {
    if (entry.state != State::kWaiting) {
      continue;
    }
    if (is_of(entry.part, wanted_)) {
      return &entry;
    }
    next = next != nullptr ? next : &entry;
  }
  return next;
}

void DeferredUpdate::run() {
  Clock::time_point memory_free = Clock::now();
  std::unique_lock lock(mutex_);
  while (Entry* entry = next_locked()) {
    entry->state = State::kRunning;
    const Entry* const following = next_locked();
    lock.unlock();
    for (const Entry* const soon : {static_cast<const Entry*>(entry), following}) {
      if (soon != nullptr && soon->part.lender) {
        soon->part.lender->expect();
      }
    }
    const Clock::time_point start = Clock::now();
    std::int64_t bytes = 0;
    try {
      bytes = update(entry->part);
    } catch (...) {  // waiting threads get the error
      lock.lock();
      entry->state = State::kFailed;
      fail_locked(std::current_exception());
      return;
    }
    double seconds = seconds_since(start);
    if (bytes_per_second_ > 0.0) {
      seconds = std::max(seconds, static_cast<double>(bytes) / bytes_per_second_);
      memory_free += std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(seconds));
      std::this_thread::sleep_until(memory_free);
    }
    if (log_ != nullptr) {
      log_->add({.row = ActivityRow::kOptimizer,
                 .kind = ActivityKind::kUpdate,
                 .label = {.block = entry->part.blocks.front()},
                 .bytes = bytes,
                 .begin = start,
                 .end = Clock::now()});
    }
    lock.lock();
    entry->state = State::kDone;
    seconds_ += seconds;
    bytes_ += bytes;
    done_.notify_all();
  }
}

std::int64_t DeferredUpdate::update(Part& part) {
  if (part.lender) {
    part.plan = part.lender->borrow();
  }
  part.plan.run(*pool_, scale_);
  if (part.lender) {
    part.lender->give_back();
  }
  return part.plan.traffic_bytes();
}

void DeferredUpdate::fail_locked(std::exception_ptr error) noexcept {
  error_ = std::move(error);
  for (Entry& entry : entries_) {
    if (entry.state == State::kWaiting) {
      entry.state = State::kFailed;
    }
  }
  done_.notify_all();
}

const DeferredUpdate::Entry* DeferredUpdate::find_locked(std::int32_t block) const {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return is_of(entry.part, block); });
  return found == entries_.end() ? nullptr : &*found;
}

double DeferredUpdate::wait(std::int32_t block) {
  home_.expect_here();
  std::unique_lock lock(mutex_);
  const Entry* const entry = find_locked(block);
  if (entry == nullptr || entry->state == State::kDone) {
    return 0.0;
  }
  const auto start = std::chrono::steady_clock::now();
  wanted_ = block;
  wait_in_pause(lock, done_, [&] { return has_ended(*entry); });
  if (entry->state == State::kFailed) {
    std::rethrow_exception(error_);
  }
  return seconds_since(start);
}

double DeferredUpdate::wait_all() {
  home_.expect_here();
  const auto all_ended = [this] { return std::all_of(entries_.begin(), entries_.end(), &DeferredUpdate::has_ended); };
  std::unique_lock lock(mutex_);
  const auto start = std::chrono::steady_clock::now();
  const bool waits = !all_ended();
  wait_in_pause(lock, done_, all_ended);
  if (error_) {
    std::rethrow_exception(error_);
  }
  return waits ? seconds_since(start) : 0.0;
}

bool DeferredUpdate::finished(std::int32_t block) const {
  if (!home_.here()) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  const Entry* const entry = find_locked(block);
  return entry == nullptr || entry->state == State::kDone;
}

double DeferredUpdate::seconds() const {
  if (!home_.here()) {
    return 0.0;
  }
  const std::lock_guard lock(mutex_);
  return seconds_;
}

std::int64_t DeferredUpdate::bytes() const {
  if (!home_.here()) {
    return 0;
  }
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace hydra
