#include "csrc/transfer/cuda/cuda_stall_log.h"

#include <algorithm>
#include <utility>

#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

constexpr std::size_t kMost = 1 << 18;  // of a log that is not stopped

}  // namespace

CudaStallLog::CudaStallLog(int device, std::function<cudaStream_t()> current_stream)
    : device_(device), current_stream_(std::move(current_stream)), events_(device, /*timed=*/true) {}

void CudaStallLog::start() {
  const std::lock_guard lock(mutex_);
  until_.assign(1, 0.0);
  pending_.clear();
  begin_.reset();
  on_ = true;
}

void CudaStallLog::stop() noexcept { on_ = false; }

std::int64_t CudaStallLog::count() const noexcept {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(until_.size() - 1 + pending_.size());
}

double CudaStallLog::seconds(std::int64_t first, std::int64_t end) {
  const std::lock_guard lock(mutex_);
  fold_locked(/*wait=*/true);
  const auto last = static_cast<std::int64_t>(until_.size()) - 1;
  const auto until = [&](std::int64_t number) {
    return until_[static_cast<std::size_t>(std::clamp<std::int64_t>(number, 0, last))];
  };
  return until(end) - until(first);
}

bool CudaStallLog::begin() noexcept {
  if (!on_.load(std::memory_order_relaxed)) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  if (depth_++ == 0) {
    begin_ = marked();
  }
  return true;
}

void CudaStallLog::end() noexcept {
  const std::lock_guard lock(mutex_);
  if (--depth_ > 0 || !begin_) {
    return;
  }
  CudaEventPtr begin = std::exchange(begin_, nullptr);
  CudaEventPtr end = marked();
  fold_locked(/*wait=*/false);
  if (end && until_.size() + pending_.size() < kMost) {
    pending_.push_back({std::move(begin), std::move(end)});
  }
}

CudaEventPtr CudaStallLog::marked() noexcept {
  try {
    const CudaDeviceGuard guard(device_);
    CudaEventPtr event = events_.take();
    event->record(current_stream_());
    return event;
  } catch (const std::exception&) {
    return nullptr;  // the device has failed, which its next call reports
  }
}

void CudaStallLog::fold_locked(bool wait) {
  while (!pending_.empty() && (wait || pending_.front().end->reached())) {
    const auto [begin, end] = std::move(pending_.front());
    pending_.pop_front();
    const bool ended = end->wait() == cudaSuccess;
    until_.push_back(until_.back() + (ended ? std::max(0.0, CudaEventPool::elapsed_seconds(*begin, *end)) : 0.0));
  }
}

}  // namespace hydra
