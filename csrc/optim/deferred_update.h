// An optimizer step that runs while its model goes on: one thread updates block after block, in the order in which
// the next forward needs them, and a block that a caller waits for is done next.
//
// Host memory can be given a speed: a block then takes at least bytes / speed. That is a clock which runs on through
// the blocks, so that a thread that wakes up late makes no block after it later.
//
// Owns plans, not the memory they point to: weights, gradients and state stay alive and in place until it is finished,
// or what is borrowed for a block until it is given back. If that fails, so has the update: neither that block nor any
// that had not begun is updated, and each thread that waits for one of them gets the error.
// Threads: wait() and finished() from anywhere, without the interpreter lock. A forked child has not the thread, and
// perhaps memory that the thread was writing: there waiting throws StateError, no block is finished, and nothing is
// destroyed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/base/activity.h"
#include "csrc/base/process.h"
#include "csrc/optim/step_plan.h"

namespace hydra {

/// Memory that a block's update has for a while.
class Lender {
 public:
  virtual ~Lender() = default;
  /// The block's turn comes, or is the one after: what it needs may be fetched. Perhaps more than once. Must not wait.
  virtual void expect() noexcept = 0;
  /// May wait, and may throw.
  virtual StepPlan borrow() = 0;
  /// What was borrowed has been written. May throw.
  virtual void give_back() = 0;
};

class DeferredUpdate {
 public:
  /// The updates of one block, or of several whose weights share memory, in the order in which the optimizer makes
  /// them.
  struct Part {
    std::vector<std::int32_t> blocks;
    StepPlan plan;
    std::unique_ptr<Lender> lender;  // gives the plan, unless it is null
  };

  /// Begins at once. Gradients are multiplied by `scale`. `bytes_per_second`: of the memory; 0 for as fast as it is.
  /// `log` may be null, and has to outlive the update.
  DeferredUpdate(std::vector<Part> parts, std::shared_ptr<ThreadPool> pool, float scale, double bytes_per_second = 0.0,
                 ActivityLog* log = nullptr);
  /// As the constructor; left as it is where a forked child would destroy it.
  static std::shared_ptr<DeferredUpdate> begin(std::vector<Part> parts, std::shared_ptr<ThreadPool> pool, float scale,
                                               double bytes_per_second, ActivityLog* log);
  /// Blocks until all is done.
  ~DeferredUpdate();
  DeferredUpdate(const DeferredUpdate&) = delete;
  DeferredUpdate& operator=(const DeferredUpdate&) = delete;

  /// Blocks until the block is updated, or never will be, which it throws. Returns at once for a block that has no part
  /// in it, but in a forked child. Seconds it blocked.
  double wait(std::int32_t block);
  double wait_all();
  /// Whether the block is updated.
  bool finished(std::int32_t block) const;
  /// Time spent on updates so far, and bytes that they have read and written; 0 in a forked child.
  double seconds() const;
  std::int64_t bytes() const;

 private:
  enum class State : std::uint8_t { kWaiting, kRunning, kDone, kFailed };
  struct Entry {
    Part part;
    State state = State::kWaiting;
  };

  static bool has_ended(const Entry& entry) noexcept {
    return entry.state == State::kDone || entry.state == State::kFailed;
  }
  void run();
  /// Bytes that it has read and written.
  std::int64_t update(Part& part);
  void fail_locked(std::exception_ptr error) noexcept;
  Entry* next_locked();
  const Entry* find_locked(std::int32_t block) const;

  const HomeProcess home_;
  std::shared_ptr<ThreadPool> pool_;
  float scale_;
  double bytes_per_second_;
  ActivityLog* log_;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::vector<Entry> entries_;
  std::int32_t wanted_ = -1;  // a block that a thread waits for
  double seconds_ = 0.0;
  std::int64_t bytes_ = 0;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace hydra
