// The way between host memory and a spill file: whole extents, piece by piece, by several threads.
//
// Reads come before writes, since a caller waits for them; but one of several threads is the writes' while some wait,
// whose memory is wanted, too. Otherwise jobs are served in the order they were asked for. A job waits for those of its
// extent that were asked for before, unless both read; a write that a read waits for comes in that read's place.
// Memory: see SpillFile; a job owns what it is given until just before its ticket ends. A job whose piece has failed
// moves no more of them, and its ticket has the first error. The file has to outlive the lane.
//
// Threads: any. Only drain() and the destructor wait for a transfer. In a forked child, which has none of
// the threads, submit() throws StateError and the rest does nothing.
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
  void* data = nullptr;         // as long as the extent
  std::shared_ptr<void> owner;  // of the memory; may be null
};

class DiskLane final {
 public:
  static constexpr int kThreads = 4;

  /// Throws SpillError if there can be no threads.
  explicit DiskLane(SpillFile& file, int threads = kThreads);
  /// Drains.
  ~DiskLane();
  DiskLane(const DiskLane&) = delete;
  DiskLane& operator=(const DiskLane&) = delete;

  TicketPtr submit(DiskJob job);
  /// Blocks until everything submitted before this call has finished, whatever the outcome.
  void drain() noexcept;
  LaneStatistics statistics(DiskDirection direction) const;
  SpillFile& file() noexcept { return file_; }

 private:
  struct Running {
    DiskJob job;
    TicketPtr ticket;
    std::int64_t sequence = 0;
    std::int64_t pieces = 0;
    std::int64_t next = 0;   // piece to be begun
    std::int64_t ended = 0;  // with those that are left out
    std::chrono::steady_clock::time_point begin;
    double seconds = 0.0;
    std::exception_ptr error;
  };
  using RunningPtr = std::shared_ptr<Running>;

  void run() noexcept;
  /// Joins the threads there are.
  void stop() noexcept;
  using Queue = std::deque<RunningPtr>;

  /// The first earlier job of its extent that has to end before it begins; null if there is none. Under the mutex.
  RunningPtr held_back_by(const Running& running) const noexcept;
  /// The job whose turn it is: of the writes if it is theirs. Under the mutex.
  RunningPtr next() const noexcept;
  /// One piece of the most urgent job; null when there is nothing to begin. Under the mutex.
  RunningPtr take_piece(std::int64_t& piece) noexcept;
  void move(Running& running, std::int64_t piece);
  /// Whether it was the job's last. Under the mutex.
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
  int writing_ = 0;  // threads that do
  bool stopping_ = false;
  std::array<LaneStatistics, 2> statistics_;
  HomeOnly<std::vector<std::thread>> threads_;
};

}  // namespace hydra
