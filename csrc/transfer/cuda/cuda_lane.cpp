#include "csrc/transfer/cuda/cuda_lane.h"

#include <algorithm>
#include <utility>

#include "csrc/base/device_turns.h"
#include "csrc/base/errors.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

/// The device's clock is anchored to the host's at most this long: on an idle link the clocks drift apart.
constexpr std::chrono::seconds kAnchorHolds{1};

}  // namespace

CudaLane::CudaLane(int device, cudaMemcpyKind kind, ActivityLog& log)
    : device_(device),
      kind_(kind),
      events_(device, /*timed=*/true),
      activity_(&log, kind == cudaMemcpyHostToDevice ? ActivityRow::kToDevice : ActivityRow::kToHost) {
  const CudaDeviceGuard guard(device);
  // Non-blocking, because the default stream, which most compute runs on, must not order the copies.
  HYDRA_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  *enqueuer_ = std::thread([this] { enqueue_jobs(); });
  *completer_ = std::thread([this] { complete_batches(); });
}

CudaLane::~CudaLane() {
  if (!home_.here()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_->notify_all();
  }
  enqueuer_->join();
  for (Class& jobs : classes_) {
    if (jobs.preparer->joinable()) {
      jobs.preparer->join();
    }
  }
  completer_->join();
  forget_cuda_error(cudaStreamDestroy(stream_));
}

TicketPtr CudaLane::submit(Job job) {
  home_.expect_here();
  expect_memory(job);
  auto pending = std::make_shared<Pending>();
  pending->ticket = std::make_shared<CudaTicket>(job.bytes());
  TicketPtr ticket = pending->ticket;
  Class& jobs = classes_.at(static_cast<std::size_t>(job.priority));
  pending->prepared = !job.before && !job.locate;
  pending->job = std::move(job);
  const std::lock_guard lock(mutex_);
  HYDRA_EXPECT(!stopping_, StateError, "this lane is closing and takes no more jobs");
  if (!pending->prepared && !jobs.preparer->joinable()) {
    *jobs.preparer = std::thread([this, &jobs] { prepare_jobs(jobs); });
  }
  pending->sequence = submitted_ + 1;
  unfinished_.insert(pending->sequence);
  try {
    jobs.queue.push_back(pending);
  } catch (...) {  // the job was not submitted
    unfinished_.erase(pending->sequence);
    throw;
  }
  ++submitted_;
  changed_->notify_all();
  return ticket;
}

void CudaLane::drain() noexcept {
  if (!home_.here()) {
    return;
  }
  std::unique_lock lock(mutex_);
  const std::int64_t last = submitted_;
  wait_in_pause(lock, *changed_, [this, last] { return unfinished_.empty() || *unfinished_.begin() > last; });
}

LaneStatistics CudaLane::statistics() const noexcept {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

// ---- the preparers ----------------------------------------------------------------------------

void CudaLane::prepare_jobs(const Class& jobs) noexcept {
  // New threads start on device 0. A failure shows in every later ticket.
  forget_cuda_error(cudaSetDevice(device_));
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_->wait(lock, [this, &jobs] { return jobs.queue.empty() ? stopping_ : !jobs.queue.front()->prepared; });
    if (jobs.queue.empty()) {
      return;
    }
    const PendingPtr pending = jobs.queue.front();
    lock.unlock();
    try {
      prepare_job(pending->job);
    } catch (...) {
      pending->prepare_error = std::current_exception();
    }
    lock.lock();
    pending->prepared = true;
    changed_->notify_all();
  }
}

// ---- the enqueuer -----------------------------------------------------------------------------

void CudaLane::enqueue_jobs() noexcept {
  forget_cuda_error(cudaSetDevice(device_));
  std::unique_lock lock(mutex_);
  for (;;) {
    Class* jobs = nullptr;
    changed_->wait(lock, [this, &jobs] {
      jobs = next_class();
      return jobs != nullptr ? in_flight_.size() < kInFlight : stopping_ && !has_queued();
    });
    if (jobs == nullptr) {
      enqueuer_ended_ = true;
      changed_->notify_all();
      return;
    }
    const PendingPtr pending = jobs->queue.front();
    lock.unlock();
    Batch batch = enqueue_batch(pending);
    lock.lock();
    if (batch.last) {
      jobs->queue.pop_front();  // still this job: other threads only append
    }
    in_flight_.push_back(std::move(batch));
    changed_->notify_all();
  }
}

CudaLane::Class* CudaLane::next_class() noexcept {
  const auto found = std::ranges::find_if(
      classes_, [](const Class& jobs) { return !jobs.queue.empty() && jobs.queue.front()->prepared; });
  return found == classes_.end() ? nullptr : &*found;
}

bool CudaLane::has_queued() const noexcept {
  return std::ranges::any_of(classes_, [](const Class& jobs) { return !jobs.queue.empty(); });
}

CudaLane::Batch CudaLane::enqueue_batch(const PendingPtr& pending) noexcept {
  Batch batch;
  batch.pending = pending;
  try {
    Job& job = pending->job;
    if (!std::exchange(pending->begun, true)) {
      if (pending->prepare_error) {
        std::rethrow_exception(pending->prepare_error);
      }
      wait_for_fences(job);
    }
    batch.start = events_.take();
    batch.start->record(stream_);
    batch.bytes = copy_some(*pending);
    const CudaEventPtr end = events_.take();
    end->record(stream_);
    batch.end = end;
    batch.last = pending->segment == job.segments.size();
    if (batch.last) {
      pending->ticket->set_event(end);
      pending->ticket->mark_enqueued();
    }
  } catch (...) {
    pending->enqueue_error = std::current_exception();
    batch.last = true;
  }
  return batch;
}

void CudaLane::wait_for_fences(const Job& job) {
  for (const FencePtr& fence : job.fences) {
    if (const auto* known = dynamic_cast<const CudaFence*>(fence.get())) {
      known->hold_back(stream_);
    } else if (fence) {
      fence->wait();
    }
  }
}

Bytes CudaLane::copy_some(Pending& pending) {
  const std::vector<Segment>& segments = pending.job.segments;
  Bytes copied = 0;
  while (pending.segment < segments.size()) {
    const Segment& segment = segments[pending.segment];
    const Bytes bytes = std::min(segment.bytes - pending.offset, kBatchBytes - copied);
    if (bytes > 0) {
      check_cuda(cudaMemcpyAsync(static_cast<char*>(segment.destination) + pending.offset,
                                 static_cast<const char*>(segment.source) + pending.offset,
                                 static_cast<std::size_t>(bytes), kind_, stream_),
                 "cudaMemcpyAsync", bytes);
      pending.offset += bytes;
      copied += bytes;
    }
    if (pending.offset < segment.bytes) {
      break;
    }
    ++pending.segment;
    pending.offset = 0;
  }
  return copied;
}

// ---- the completer ----------------------------------------------------------------------------

void CudaLane::complete_batches() noexcept {
  forget_cuda_error(cudaSetDevice(device_));
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_->wait(lock, [this] { return !in_flight_.empty() || enqueuer_ended_; });
    if (in_flight_.empty()) {
      return;
    }
    const Batch batch = in_flight_.front();
    lock.unlock();
    complete(batch);
    lock.lock();
    in_flight_.pop_front();
    if (batch.last) {
      unfinished_.erase(batch.pending->sequence);
    }
    changed_->notify_all();
  }
}

void CudaLane::complete(const Batch& batch) noexcept {
  Pending& pending = *batch.pending;
  // Without an end event, part of the batch may have been enqueued: wait for the whole stream.
  const cudaError_t status = batch.end ? batch.end->wait() : wait_for_stream();
  if (status != cudaSuccess && !pending.copy_error) {
    try {
      throw_cuda_error(status, "a copy, or a kernel before it", batch.bytes);
    } catch (...) {
      pending.copy_error = std::current_exception();
    }
  }
  if (batch.end && status == cudaSuccess) {
    const double seconds = CudaEventPool::elapsed_seconds(*batch.start, *batch.end);
    record(batch, seconds);
    pending.moved += batch.bytes;
    pending.seconds += batch.bytes > 0 ? seconds : 0.0;
    const std::lock_guard lock(mutex_);
    statistics_.bytes += batch.bytes;
    statistics_.busy_seconds += batch.bytes > 0 ? seconds : 0.0;
  }
  if (batch.last) {
    finish(pending);
  }
}

cudaError_t CudaLane::wait_for_stream() const noexcept {
  const CudaCaptureGuard guard;
  const cudaError_t status = cudaStreamSynchronize(stream_);
  forget_cuda_error(status);
  return status;
}

void CudaLane::record(const Batch& batch, double seconds) noexcept {
  const Activity::Time seen = activity_.now(batch.pending->job);
  if (seen == Activity::Time{} || batch.bytes == 0) {
    return;
  }
  const auto ticks = [](double duration) {
    return std::chrono::duration_cast<ActivityLog::Clock::duration>(std::chrono::duration<double>(duration));
  };
  // The host may see the end late, never early. So the time since the batch before is measured by the device.
  Activity::Time end = seen;
  if (anchor_ && seen - anchor_time_ < kAnchorHolds) {
    end = std::min(seen, anchor_time_ + ticks(CudaEventPool::elapsed_seconds(*anchor_, *batch.end)));
  }
  const Activity::Time begin = std::min(end, std::max(anchor_time_, end - ticks(seconds)));
  const Pending& pending = *batch.pending;
  activity_.moved(pending.sequence, pending.job, pending.moved, batch.bytes, begin, end);
  anchor_ = batch.end;
  anchor_time_ = end;
}

void CudaLane::finish(Pending& pending) noexcept {
  activity_.flush();
  // The first error counts: copies in flight came before those that were still to be enqueued.
  std::exception_ptr error = pending.copy_error ? pending.copy_error : pending.enqueue_error;
  if (!error && pending.job.after) {
    try {
      pending.job.after();
    } catch (...) {
      error = std::current_exception();
    }
  }
  // The job's owners are dropped before the ticket ends: threads that wait for the ticket rely on it.
  pending.job = Job{};
  {
    const std::lock_guard lock(mutex_);
    ++statistics_.jobs;
    statistics_.failures += error ? 1 : 0;
  }
  if (error) {
    pending.ticket->fail(std::move(error));
  } else {
    pending.ticket->complete(pending.seconds);
  }
}

}  // namespace hydra
