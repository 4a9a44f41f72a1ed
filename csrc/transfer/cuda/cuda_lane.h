// One direction of a CUDA device's link: a stream of its own, and two host threads.
//
// The enqueuer takes jobs by priority, runs `before`, makes the stream wait for the fences and enqueues copies in
// batches of at most kBatchBytes, with an event behind each. A few batches are in flight at once, so that the
// link never waits for the host, and so few that a more urgent job is not held up for long. The completer waits
// for the batches in order, runs `after`, and ends the tickets, failed ones included, so that nothing of a job is
// in flight any more when its ticket ends. A ticket is marked enqueued when its last event is recorded: from
// then on a compute stream can wait for it without the host.
//
// Neither thread takes the interpreter lock; what a job's functions own may, when it is dropped. Errors of
// kernels surface in the tickets of this lane too, since CUDA reports them at the next call.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#include "csrc/base/process.h"
#include "csrc/transfer/cuda/cuda_event.h"
#include "csrc/transfer/lane_activity.h"

namespace hydra {

class CudaTicket final : public Ticket {
 public:
  using Ticket::Ticket;

  /// Valid once the ticket is enqueued and has not failed: behind the last byte.
  const CudaEvent* event() const noexcept { return event_.get(); }
  /// For the lane, before mark_enqueued().
  void set_event(CudaEventPtr event) noexcept { event_ = std::move(event); }

 private:
  CudaEventPtr event_;
};

class CudaLane final : public Lane {
 public:
  static constexpr Bytes kBatchBytes = 16 * kMiB;
  static constexpr std::size_t kInFlight = 4;

  /// `log` has to outlive the lane. In it are copies by the device's events; the jobs' functions run beside them.
  CudaLane(int device, cudaMemcpyKind kind, ActivityLog& log);
  ~CudaLane() override;

  TicketPtr submit(Job job) override;
  void drain() noexcept override;
  LaneStatistics statistics() const noexcept override;
  std::size_t in_flight() const noexcept override { return kInFlight; }

  /// For tests, which delay it.
  cudaStream_t stream() const noexcept { return stream_; }

 private:
  struct Pending {
    Job job;
    std::shared_ptr<CudaTicket> ticket;
    std::int64_t sequence = 0;
    // The enqueuer's until the last batch is in flight.
    std::size_t segment = 0;
    Bytes offset = 0;
    bool begun = false;
    std::exception_ptr enqueue_error;
    // The completer's.
    std::exception_ptr copy_error;
    Bytes moved = 0;
    double seconds = 0.0;
  };
  using PendingPtr = std::shared_ptr<Pending>;
  struct Batch {
    PendingPtr pending;
    CudaEventPtr start;
    CudaEventPtr end;  // null when enqueueing failed
    Bytes bytes = 0;
    bool last = false;
  };
  using Queue = std::deque<PendingPtr>;

  void enqueue_jobs() noexcept;
  void complete_batches() noexcept;
  Queue* next_queue() noexcept;
  Batch enqueue_batch(const PendingPtr& pending) noexcept;
  void wait_for_fences(const Job& job);
  Bytes copy_some(Pending& pending);
  void complete(const Batch& batch) noexcept;
  void record(const Batch& batch, double seconds) noexcept;
  void finish(Pending& pending) noexcept;

  const int device_;
  const cudaMemcpyKind kind_;
  cudaStream_t stream_ = nullptr;
  CudaEventPool events_;

  const HomeProcess home_;
  mutable std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  /// By priority; a job leaves its queue when its last batch is in flight.
  std::array<Queue, 3> queues_;
  std::deque<Batch> in_flight_;
  std::set<std::int64_t> unfinished_;
  std::int64_t submitted_ = 0;
  bool stopping_ = false;
  bool enqueuer_ended_ = false;
  LaneStatistics statistics_;

  // The completer's own.
  LaneActivity activity_;
  CudaEventPtr anchor_;  // the end of the last batch that was recorded, and when the host's clock showed it
  Activity::Time anchor_time_{};

  HomeOnly<std::thread> enqueuer_;
  HomeOnly<std::thread> completer_;
};

}  // namespace hydra
