#include "csrc/transfer/shared_backend.h"

#include <deque>
#include <mutex>
#include <utility>

namespace hydra {

/// One run's view of a lane.
class SharedBackend::SharedLane final : public Lane {
 public:
  SharedLane(Lane& lane, ActivityLog& log) noexcept : lane_(lane), log_(log) {}
  ~SharedLane() override { drain(); }

  TicketPtr submit(Job job) override {
    job.log = &log_;
    const std::lock_guard lock(mutex_);
    fold_locked();
    // Under the lock, so that drain() sees every job that was submitted before it.
    unfinished_.emplace_back();
    try {
      unfinished_.back() = lane_.submit(std::move(job));
    } catch (...) {  // re-raised
      unfinished_.pop_back();
      throw;
    }
    return unfinished_.back();
  }

  void drain() noexcept override {
    for (;;) {
      TicketPtr oldest;
      {
        const std::lock_guard lock(mutex_);
        fold_locked();
        if (unfinished_.empty() || !home_.here()) {
          return;
        }
        oldest = unfinished_.front();
      }
      oldest->wait_quietly();
    }
  }

  LaneStatistics statistics() const noexcept override {
    const std::lock_guard lock(mutex_);
    fold_locked();
    return statistics_;
  }

  std::size_t in_flight() const noexcept override { return lane_.in_flight(); }

 private:
  /// Counts the jobs that have ended. Of several priorities a later one may end first.
  void fold_locked() const noexcept {
    std::erase_if(unfinished_, [this](const TicketPtr& ticket) {
      if (!ticket->finished()) {
        return false;
      }
      const bool failed = ticket->error() != nullptr;
      ++statistics_.jobs;
      statistics_.failures += failed ? 1 : 0;
      statistics_.bytes += failed ? 0 : ticket->bytes();
      statistics_.busy_seconds += ticket->seconds();
      return true;
    });
  }

  const HomeProcess home_;
  Lane& lane_;
  ActivityLog& log_;
  mutable std::mutex mutex_;
  mutable std::deque<TicketPtr> unfinished_;
  mutable LaneStatistics statistics_;
};

SharedBackend::SharedBackend(std::shared_ptr<DeviceBackend> device)
    : device_(std::move(device)),
      to_device_(std::make_unique<SharedLane>(device_->to_device(), activity())),
      to_host_(std::make_unique<SharedLane>(device_->to_host(), activity())) {}

SharedBackend::~SharedBackend() = default;

DeviceBackend& device_of(DeviceBackend& backend) noexcept {
  const auto* const shared = dynamic_cast<const SharedBackend*>(&backend);
  return shared == nullptr ? backend : *shared->device_;
}

Lane& SharedBackend::to_device() noexcept { return *to_device_; }

Lane& SharedBackend::to_host() noexcept { return *to_host_; }

}  // namespace hydra
