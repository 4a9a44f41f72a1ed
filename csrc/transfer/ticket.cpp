#include "csrc/transfer/ticket.h"

#include <utility>

#include "csrc/base/device_turns.h"

namespace hydra {

bool Ticket::finished() const noexcept {
  const std::lock_guard lock(mutex_);
  return finished_locked();
}

void Ticket::wait() {
  home_.expect_here();
  wait_quietly();
  if (std::exception_ptr failure = error()) {
    std::rethrow_exception(std::move(failure));
  }
}

void Ticket::wait_quietly() noexcept {
  if (!home_.here()) {
    return;
  }
  std::unique_lock lock(mutex_);
  wait_in_pause(lock, changed_, [this] { return finished_locked(); });
}

void Ticket::wait_enqueued() noexcept {
  if (!home_.here()) {
    return;
  }
  std::unique_lock lock(mutex_);
  wait_in_pause(lock, changed_, [this] { return state_ != State::kQueued; });
}

std::exception_ptr Ticket::error() const noexcept {
  const std::lock_guard lock(mutex_);
  return error_;
}

double Ticket::seconds() const noexcept {
  const std::lock_guard lock(mutex_);
  return seconds_;
}

void Ticket::mark_enqueued() noexcept {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kQueued) {
    state_ = State::kEnqueued;
    changed_.notify_all();
  }
}

void Ticket::complete(double seconds) noexcept {
  const std::lock_guard lock(mutex_);
  if (!finished_locked()) {
    state_ = State::kDone;
    seconds_ = seconds;
    changed_.notify_all();
  }
}

void Ticket::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (!finished_locked()) {
    state_ = State::kFailed;
    error_ = std::move(error);
    changed_.notify_all();
  }
}

}  // namespace hydra
