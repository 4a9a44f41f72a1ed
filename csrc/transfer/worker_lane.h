// A lane with one thread: the queues, their priorities, and the statistics. A subclass moves the bytes.
//
// The most urgent class runs first; within a class jobs of one run run in the order of submission. Several runs share
// the lane by time: of equally urgent jobs the next piece is of the run that the lane has worked for the least, among
// those that have jobs. Between two pieces of a job another one may run. A job's own pieces stay in order. Owns the
// thread and the jobs. Thread-safe.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <thread>

#include "csrc/base/process.h"
#include "csrc/transfer/lane_activity.h"

namespace hydra {

class WorkerLane : public Lane {
 public:
  static constexpr Bytes kPieceBytes = 16 * kMiB;

  TicketPtr submit(Job job) final;
  void drain() noexcept final;
  LaneStatistics statistics() const noexcept final;

 protected:
  using Clock = std::chrono::steady_clock;

  /// `log` may be null, and has to outlive the lane.
  explicit WorkerLane(ActivityLog* log = nullptr, ActivityRow row = ActivityRow::kToDevice) noexcept
      : activity_(log, row) {}
  /// A subclass calls start() at the end of its constructor and stop() at the beginning of its destructor, since
  /// the thread calls its virtual functions. stop() drains; in a forked child it does nothing.
  void start();
  void stop() noexcept;

  /// Runs once on the worker before the first job, to set the thread's properties. Must not throw.
  virtual void on_thread_start() {}
  /// Runs before the first byte of a job, and waits for its fences. May throw.
  virtual void begin(Job& job) = 0;
  /// Moves one piece of 1 to kPieceBytes, and returns the seconds it took, when the bytes have arrived.
  /// May throw.
  virtual double move(const Segment& piece) = 0;

  /// For begin() and move(): the time since which only this lane's transfers have delayed the job. It is the later of
  /// the job's submission and the end of the last host function. With it a model of a link can make up for a late
  /// wake-up of this thread, and moves no byte before it was submitted.
  Clock::time_point runnable_since() const noexcept { return runnable_since_; }

 private:
  struct Pending {
    Job job;
    TicketPtr ticket;
    std::int64_t sequence = 0;
    Clock::time_point submitted;
    std::size_t segment = 0;
    Bytes offset = 0;
    Bytes moved = 0;
    bool begun = false;
    double seconds = 0.0;
  };
  using Queue = std::deque<Pending>;
  /// The jobs of one run, as long as it has any.
  struct Flow {
    const ActivityLog* run = nullptr;  // the jobs' log; null for those of the device's only run
    double seconds = 0.0;              // that the lane has worked for it, as far as others had jobs too
    std::array<Queue, 3> queues{};     // indexed by priority
  };
  struct Next {
    Flow* flow = nullptr;
    Queue* queue = nullptr;
  };

  void run() noexcept;
  // Under the mutex.
  Flow& flow_of(const Job& job);
  /// The queue of the job that runs next; null if there is no job.
  Next next() noexcept;
  /// Removes the flow of a run that has no jobs. That of the device's only run stays.
  void forget_idle(const Flow& flow) noexcept;

  /// One step of one job: its begin or one piece. True when the job has ended.
  bool advance(Pending& pending);
  void move_next_piece(Pending& pending);
  void run_host_function(const Job& job, const std::function<void()>& function);
  void finish(Pending& pending, std::exception_ptr error) noexcept;

  const HomeProcess home_;
  mutable std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  /// A job stays at the front of its queue until its ticket has ended, so the fronts are the oldest unfinished jobs of
  /// their queues. Flows stay in place. Only the worker pops jobs and removes flows.
  std::list<Flow> flows_;
  std::int64_t submitted_ = 0;
  bool stopping_ = false;
  LaneStatistics statistics_;

  // Only the worker uses these.
  LaneActivity activity_;
  Clock::time_point host_function_end_;
  Clock::time_point runnable_since_;

  HomeOnly<std::thread> thread_;
};

}  // namespace hydra
