// One direction of a CUDA device's link: a stream of its own, and its host threads.
//
// A preparer runs `before` and `locate` of the oldest job of its class, which may wait for an update or a disk. Until
// then jobs of other classes go ahead. Classes whose jobs have no such functions have no preparer.
// The enqueuer takes prepared jobs by priority, makes the stream wait for the fences, and enqueues copies in batches of
// at most kBatchBytes, with an event behind each. A few batches are in flight at once, so that the link never waits for
// the host. They are so few that a more urgent job is not delayed for long.
// The completer waits for the batches in order, runs `after`, and ends the tickets, including failed ones. So no copy
// of a job is in flight when its ticket ends. A ticket is marked enqueued when its last event is recorded: from
// then on a compute stream can wait for it without the host.
//
// Owns the stream, the threads and the jobs. Thread-safe. No thread takes the interpreter lock, but objects that a
// job's functions own may take it when they are dropped. CUDA reports a kernel's error at the next call, so tickets of
// this lane may carry errors of kernels.
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

  /// The event behind the last byte. Valid once the ticket is enqueued, unless it has failed.
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

  /// `log` has to outlive the lane. Copies are logged by the device's events; jobs' functions run beside them.
  CudaLane(int device, cudaMemcpyKind kind, ActivityLog& log);
  ~CudaLane() override;

  TicketPtr submit(Job job) override;
  void drain() noexcept override;
  LaneStatistics statistics() const noexcept override;
  std::size_t in_flight() const noexcept override { return kInFlight; }

  /// For tests, which delay the stream.
  cudaStream_t stream() const noexcept { return stream_; }

 private:
  struct Pending {
    Job job;
    std::shared_ptr<CudaTicket> ticket;
    std::int64_t sequence = 0;
    bool prepared = false;  // under the mutex
    // Only the preparer uses this until then.
    std::exception_ptr prepare_error;
    // Only the enqueuer uses these, until the last batch is in flight.
    std::size_t segment = 0;
    Bytes offset = 0;
    bool begun = false;
    std::exception_ptr enqueue_error;
    // Only the completer uses these.
    std::exception_ptr copy_error;
    Bytes moved = 0;
    double seconds = 0.0;
  };
  using PendingPtr = std::shared_ptr<Pending>;
  struct Batch {
    PendingPtr pending;
    CudaEventPtr start;
    CudaEventPtr end;  // null if enqueueing failed
    Bytes bytes = 0;
    bool last = false;
  };
  /// The jobs of one priority. A job leaves when its last batch is in flight.
  struct Class {
    std::deque<PendingPtr> queue;
    HomeOnly<std::thread> preparer;  // runs once a job needs it
  };

  void prepare_jobs(const Class& jobs) noexcept;
  void enqueue_jobs() noexcept;
  void complete_batches() noexcept;
  /// The most urgent class whose oldest job is prepared, or null.
  Class* next_class() noexcept;
  bool has_queued() const noexcept;
  Batch enqueue_batch(const PendingPtr& pending) noexcept;
  void wait_for_fences(const Job& job);
  Bytes copy_some(Pending& pending);
  void complete(const Batch& batch) noexcept;
  cudaError_t wait_for_stream() const noexcept;
  void record(const Batch& batch, double seconds) noexcept;
  void finish(Pending& pending) noexcept;

  const int device_;
  const cudaMemcpyKind kind_;
  cudaStream_t stream_ = nullptr;
  CudaEventPool events_;

  const HomeProcess home_;
  mutable std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  std::array<Class, 3> classes_;  // indexed by priority
  std::deque<Batch> in_flight_;
  std::set<std::int64_t> unfinished_;
  std::int64_t submitted_ = 0;
  bool stopping_ = false;
  bool enqueuer_ended_ = false;
  LaneStatistics statistics_;

  // Only the completer uses these.
  LaneActivity activity_;
  CudaEventPtr anchor_;  // the end of the last batch that was logged; anchor_time_ is its time on the host's clock
  Activity::Time anchor_time_{};

  HomeOnly<std::thread> enqueuer_;
  HomeOnly<std::thread> completer_;
};

}  // namespace hydra
