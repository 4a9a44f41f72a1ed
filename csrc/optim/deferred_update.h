// An optimizer step that runs while its model goes on: one thread updates block after block, in the order in which
// the next forward needs them, and whoever needs one sooner has it done next.
//
// Host memory can be given a speed: a block then takes at least bytes / speed. That is a clock which runs on through
// the blocks, so that a thread that wakes up late makes no block after it later.
//
// Owns plans, not the memory they point to: weights, gradients and state stay alive and in place until it is finished.
// Threads: wait() and finished() from anywhere, without the interpreter lock.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/base/activity.h"
#include "csrc/optim/step_plan.h"

namespace hydra {

class DeferredUpdate {
 public:
  /// The updates of one block.
  struct Part {
    std::int32_t block = -1;
    StepPlan plan;
  };

  /// Begins at once. Gradients are multiplied by `scale`. `bytes_per_second`: of the memory; 0 for as fast as it is.
  /// `log` may be null, and has to outlive the update.
  DeferredUpdate(std::vector<Part> parts, std::shared_ptr<ThreadPool> pool, float scale, double bytes_per_second = 0.0,
                 ActivityLog* log = nullptr);
  /// Blocks until all is done.
  ~DeferredUpdate();
  DeferredUpdate(const DeferredUpdate&) = delete;
  DeferredUpdate& operator=(const DeferredUpdate&) = delete;

  /// Blocks until the block is updated. Returns at once for a block that has no part in it. Seconds it blocked.
  double wait(std::int32_t block);
  double wait_all();
  bool finished(std::int32_t block) const;
  /// Time spent on updates so far, and bytes that they have read and written.
  double seconds() const;
  std::int64_t bytes() const;

 private:
  enum class State : std::uint8_t { kWaiting, kRunning, kDone };
  struct Entry {
    Part part;
    State state = State::kWaiting;
  };

  void run();
  Entry* next_locked();
  const Entry* find_locked(std::int32_t block) const;

  std::shared_ptr<ThreadPool> pool_;
  float scale_;
  double bytes_per_second_;
  ActivityLog* log_;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::vector<Entry> entries_;
  std::int32_t wanted_ = -1;  // a block that somebody waits for
  double seconds_ = 0.0;
  std::int64_t bytes_ = 0;
  std::thread thread_;
};

}  // namespace hydra
