// An optimizer step that runs beside its model. One thread updates block after block, in the order in which the next
// forward needs them. A block that a caller waits for is updated next.
//
// Host memory can be given a speed in bytes per second: a block then takes at least bytes / speed. One clock runs
// through all blocks, so a thread that wakes up late does not delay later blocks.
//
// Owns its plans, not the memory they point to: weights, gradients and state have to stay alive and in place until the
// update is finished. Memory borrowed for a block has to stay until it is returned.
// If a block's update fails, no block that has not begun is updated. Each thread that waits for one of these blocks
// gets the error.
// Threads: any, without the interpreter lock. A forked child lacks the thread, and may have memory that the thread was
// writing. In a child waiting throws StateError, no block is finished, and nothing is destroyed.
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

/// Lends memory to a block's update.
class Lender {
 public:
  virtual ~Lender() = default;
  /// Announces that the block is updated now or next, so that its memory may be fetched. May be called more than once.
  /// Must not wait.
  virtual void expect() noexcept = 0;
  /// Returns the block's plan, whose memory is borrowed. May wait, and may throw.
  virtual StepPlan borrow() = 0;
  /// Returns the borrowed memory, which the update has written. May throw.
  virtual void give_back() = 0;
};

class DeferredUpdate {
 public:
  /// The updates of one block, or of several blocks whose weights share memory, in the optimizer's order.
  struct Part {
    std::vector<std::int32_t> blocks;
    StepPlan plan;
    std::unique_ptr<Lender> lender;  // provides the plan; null: `plan` is complete
  };

  /// Begins at once. Multiplies gradients by `scale`. `bytes_per_second` is the speed of the memory; 0 sets no limit.
  /// `log` may be null, and has to outlive the update.
  DeferredUpdate(std::vector<Part> parts, std::shared_ptr<ThreadPool> pool, float scale, double bytes_per_second = 0.0,
                 ActivityLog* log = nullptr);
  /// Does what the constructor does. The pointer never destroys the update in a forked child.
  static std::shared_ptr<DeferredUpdate> begin(std::vector<Part> parts, std::shared_ptr<ThreadPool> pool, float scale,
                                               double bytes_per_second, ActivityLog* log);
  /// Blocks until all blocks are updated, or the update has failed.
  ~DeferredUpdate();
  DeferredUpdate(const DeferredUpdate&) = delete;
  DeferredUpdate& operator=(const DeferredUpdate&) = delete;

  /// Blocks until the block is updated, and returns the seconds it blocked. Throws the error if the block's update has
  /// failed. Returns at once for a block that is not in the update. Throws StateError in a forked child.
  double wait(std::int32_t block);
  double wait_all();
  /// Whether the block is updated; true for a block that is not in the update.
  bool finished(std::int32_t block) const;
  /// Seconds spent on updates so far, and bytes read and written by them; 0 in a forked child.
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
  /// Updates one part. Returns the bytes read and written.
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
