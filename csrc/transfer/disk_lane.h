// Moves whole extents between host memory and a spill file, piece by piece, on several threads.
//
// Reads go before writes, since callers wait for them. But with several threads one serves waiting writes, because
// their memory is needed too. Within a direction, jobs run in the order of submission. A job waits for earlier jobs of
// its extent, unless both read. A write that a read waits for takes the read's turn.
// Memory has to be as SpillFile says. A job keeps its owner until just before its ticket ends. After a failed piece a
// job moves no more pieces, and its ticket has the first error. The file has to outlive the lane.
//
// Threads: any. Only drain() and the destructor wait for transfers. A forked child has none of the threads: there
// submit() throws StateError, and drain() and the destructor do nothing.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/io/spill_file.h"
#include "csrc/transfer/lane.h"

namespace hydra {

enum class DiskDirection : std::uint8_t { kRead, kWrite };

struct DiskJob {
  DiskDirection direction = DiskDirection::kRead;
  std::int32_t extent = -1;
  void* data = nullptr;         // memory for the whole extent
  std::shared_ptr<void> owner;  // keeps the memory alive; may be null
};

class DiskLane final {
 public:
  static constexpr int kThreads = 4;

  /// Throws SpillError if the threads cannot start.
  explicit DiskLane(SpillFile& file, int threads = kThreads);
  /// Drains.
  ~DiskLane();
  DiskLane(const DiskLane&) = delete;
  DiskLane& operator=(const DiskLane&) = delete;

  TicketPtr submit(DiskJob job);
  /// Blocks until all jobs submitted before this call have finished or failed.
  void drain() noexcept;
  LaneStatistics statistics(DiskDirection direction) const;
  SpillFile& file() noexcept { return file_; }

 private:
  struct Running {
    DiskJob job;
    TicketPtr ticket;
    std::int64_t sequence = 0;
    std::int64_t pieces = 0;
    std::int64_t next = 0;   // the next piece to begin
    std::int64_t ended = 0;  // pieces that have ended, or were left out after an error
    std::chrono::steady_clock::time_point begin;
    double seconds = 0.0;
    std::exception_ptr error;
  };
  using RunningPtr = std::shared_ptr<Running>;

  void run() noexcept;
  /// Joins the threads that have started.
  void stop() noexcept;
  using Queue = std::deque<RunningPtr>;

  /// The first earlier job of the extent that has to end before this one begins, or null. Under the mutex.
  RunningPtr held_back_by(const Running& running) const noexcept;
  /// The job whose turn it is, or null. Under the mutex.
  RunningPtr next() const noexcept;
  /// Takes one piece of the job whose turn it is; null if no piece can begin. Under the mutex.
  RunningPtr take_piece(std::int64_t& piece) noexcept;
  void move(Running& running, std::int64_t piece);
  /// Counts the end of a piece, and returns whether it was the job's last one. Under the mutex.
  bool end_piece(Running& running, std::exception_ptr error, Bytes bytes) noexcept;
  static void finish(Running& running) noexcept;

  SpillFile& file_;
  const bool several_;
  const HomeProcess home_;
  mutable std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  std::array<Queue, 2> waiting_;  // by direction: jobs with pieces to begin
  std::list<RunningPtr> unfinished_;
  std::int64_t submitted_ = 0;
  int writing_ = 0;  // threads that write
  bool stopping_ = false;
  std::array<LaneStatistics, 2> statistics_;
  HomeOnly<std::vector<std::thread>> threads_;
};

}  // namespace hydra
