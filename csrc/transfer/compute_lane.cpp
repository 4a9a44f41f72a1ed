#include "csrc/transfer/compute_lane.h"

#include <algorithm>
#include <utility>

#include "csrc/base/device_turns.h"
#include "csrc/transfer/fault_injector.h"

namespace hydra {

/// Shared with the fences, which may outlive the lane.
struct ComputeLane::Progress {
  const HomeProcess home;
  std::mutex mutex;
  HomeOnly<std::condition_variable> changed;
  Position ended = 0;
  Position seen = 0;

  bool look(Position position) {
    const std::lock_guard lock(mutex);
    if (ended < position) {
      return false;
    }
    seen = std::max(seen, position);
    return true;
  }

  void wait(Position position) {
    if (!home.here()) {
      return;
    }
    std::unique_lock lock(mutex);
    wait_in_pause(lock, *changed, [this, position] { return ended >= position; });
    seen = std::max(seen, position);
  }

  void end_one() {
    const std::lock_guard lock(mutex);
    ++ended;
    changed->notify_all();
  }
};

class ComputeLane::PositionFence final : public Fence {
 public:
  PositionFence(std::shared_ptr<Progress> progress, Position position) noexcept
      : progress_(std::move(progress)), position_(position) {}

  bool reached() const noexcept override { return progress_->look(position_); }
  void wait() noexcept override { progress_->wait(position_); }

 private:
  const std::shared_ptr<Progress> progress_;
  const Position position_;
};

ComputeLane::ComputeLane(double longest_delay_seconds, std::uint64_t seed, std::shared_ptr<FaultInjector> faults)
    : progress_(std::make_shared<Progress>()),
      faults_(std::move(faults)),
      random_(seed),
      delay_seconds_(0.0, std::max(longest_delay_seconds, 0.0)) {
  *thread_ = std::thread([this] { run(); });
}

ComputeLane::~ComputeLane() {
  if (!home_.here()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_->notify_all();
  }
  thread_->join();
}

ComputeLane::Position ComputeLane::enqueue(std::function<void()> kernel) {
  const std::lock_guard lock(mutex_);
  const std::chrono::duration<double> delay(delay_seconds_(random_));
  queue_.push_back(
      {.function = std::move(kernel), .not_before = Clock::now() + std::chrono::duration_cast<Clock::duration>(delay)});
  changed_->notify_all();
  return ++enqueued_;
}

FencePtr ComputeLane::record() {
  const std::lock_guard lock(mutex_);
  return std::make_shared<PositionFence>(progress_, enqueued_);
}

void ComputeLane::drain() noexcept {
  Position last = 0;
  {
    const std::lock_guard lock(mutex_);
    last = enqueued_;
  }
  progress_->wait(last);
}

ComputeLane::Position ComputeLane::seen() const noexcept {
  const std::lock_guard lock(progress_->mutex);
  return progress_->seen;
}

void ComputeLane::run() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_->wait(lock, [this] { return !queue_.empty() || stopping_; });
    if (queue_.empty()) {
      return;
    }
    Kernel kernel = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::this_thread::sleep_until(kernel.not_before);
    if (faults_) {
      faults_->before_kernel();
    }
    if (kernel.function) {
      kernel.function();
      kernel.function = nullptr;  // destroys its captures before any thread sees its end
    }
    progress_->end_one();
    lock.lock();
  }
}

}  // namespace hydra
