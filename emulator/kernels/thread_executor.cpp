// The executor that runs the threads of a block as threads of the system, for ThreadSanitizer. Some blocks run at the
// same time, so that it sees races between blocks too. Each warp has a mutex of its own: with a common one, threads of
// different warps would seem to be ordered.
#include <algorithm>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "emulator/cudart/control.h"
#include "emulator/kernels/block.h"

#if defined(__SANITIZE_THREAD__)
extern "C" {  // of ThreadSanitizer's runtime
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace emulated_cuda::kernels {

namespace {

/// For a scope ThreadSanitizer does not take locks for an order: votes and shuffles give none. What the locks guard
/// would look like races then, and is not watched either.
class WithoutOrder {
 public:
  explicit WithoutOrder([[maybe_unused]] bool applies) noexcept : applies_(applies) {
#if defined(__SANITIZE_THREAD__)
    if (applies_) {
      AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
      AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
      AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
#endif
  }
  ~WithoutOrder() {
#if defined(__SANITIZE_THREAD__)
    if (applies_) {
      AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
      AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
      AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    }
#endif
  }
  WithoutOrder(const WithoutOrder&) = delete;
  WithoutOrder& operator=(const WithoutOrder&) = delete;

 private:
  [[maybe_unused]] const bool applies_;
};

struct Warp {
  explicit Warp(unsigned lanes) noexcept : meeting(lanes) {}

  std::mutex mutex;
  std::condition_variable changed;
  WarpMeeting meeting;
};

class ThreadBlock {
 public:
  ThreadBlock(const Grid& grid, std::uint64_t number, const std::function<void()>& thread);

  unsigned threads() const noexcept { return grid_.threads_of_block(); }
  const std::string& failure() const noexcept { return failure_; }
  /// The body of thread `number`.
  void run(unsigned number) noexcept;
  std::uint64_t meet_in_warp(unsigned number, const Operation& operation, const Offer& offer);
  void meet_in_block(const Operation& barrier);
  void* find_shared(const void* key, std::size_t bytes, std::size_t alignment);

 private:
  void end(unsigned number);
  void fail(const std::string& reason) noexcept;
  /// One thread less can go on.
  void count_waiting();
  std::string stuck();

  const Grid& grid_;
  const std::function<void()>& thread_;
  const uint3 index_;
  std::mutex shared_mutex_;
  SharedMemory shared_;

  std::vector<std::unique_ptr<Warp>> warps_;
  std::mutex mutex_;  // of all below but the atomic ones
  std::condition_variable changed_;
  BlockMeeting meeting_;
  std::uint64_t barriers_ = 0;  // how many all threads have passed
  std::string failure_;
  std::atomic<bool> failed_{false};
  std::atomic<unsigned> running_;  // threads that neither wait nor have ended; relaxed, so that it orders nothing
};

thread_local ThreadBlock* t_block = nullptr;
thread_local unsigned t_number = 0;

ThreadBlock::ThreadBlock(const Grid& grid, std::uint64_t number, const std::function<void()>& thread)
    : grid_(grid),
      thread_(thread),
      index_(coordinates(number, grid.blocks)),
      shared_(grid.seed ^ Random(number + 1).next()),
      meeting_(grid.threads_of_block()),
      running_(grid.threads_of_block()) {
  for (unsigned first = 0; first < threads(); first += kWarpLanes) {
    warps_.push_back(std::make_unique<Warp>(std::min(threads() - first, kWarpLanes)));
  }
}

void ThreadBlock::run(unsigned number) noexcept {
  const DeviceAccess access;
  const DeviceFloats floats;
  t_block = this;
  t_number = number;
  gridDim = grid_.blocks;
  blockDim = grid_.threads;
  blockIdx = index_;
  threadIdx = coordinates(number, grid_.threads);
  try {
    thread_();
    end(number);
  } catch (const Abandoned&) {
  } catch (const std::exception& error) {
    fail(error.what());
  } catch (...) {
    fail("a thread threw something");
  }
}

std::uint64_t ThreadBlock::meet_in_warp(unsigned number, const Operation& operation, const Offer& offer) {
  const WithoutOrder without_order(!operation.orders_memory);
  const unsigned lane = number % kWarpLanes;
  Warp& warp = *warps_[number / kWarpLanes];
  {
    const std::lock_guard lock(warp.mutex);
    if (const LaneMask released = warp.meeting.arrive(lane, operation, offer); released != 0) {
      running_.fetch_add(static_cast<unsigned>(std::popcount(released)) - 1, std::memory_order_relaxed);
      warp.changed.notify_all();
      return warp.meeting.result(lane);
    }
  }
  count_waiting();
  std::unique_lock lock(warp.mutex);
  warp.changed.wait(lock, [&] { return !warp.meeting.waits(lane) || failed_; });
  if (failed_) {
    throw Abandoned{};
  }
  return warp.meeting.result(lane);
}

void ThreadBlock::meet_in_block(const Operation& barrier) {
  std::uint64_t before = 0;
  {
    const std::lock_guard lock(mutex_);
    before = barriers_;
    if (meeting_.arrive(barrier)) {
      running_.fetch_add(threads() - 1, std::memory_order_relaxed);
      ++barriers_;
      changed_.notify_all();
      return;
    }
  }
  count_waiting();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return barriers_ != before || failed_; });
  if (failed_) {
    throw Abandoned{};
  }
}

void* ThreadBlock::find_shared(const void* key, std::size_t bytes, std::size_t alignment) {
  const WithoutOrder without_order(true);
  const std::lock_guard lock(shared_mutex_);
  return shared_.find(key, bytes, alignment);
}

void ThreadBlock::end(unsigned number) {
  {
    Warp& warp = *warps_[number / kWarpLanes];
    const std::lock_guard lock(warp.mutex);
    warp.meeting.end(number % kWarpLanes);
  }
  {
    const std::lock_guard lock(mutex_);
    meeting_.end();
  }
  count_waiting();
}

void ThreadBlock::fail(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_.exchange(true)) {
      failure_ = failure_of(grid_, index_, reason);
    }
    changed_.notify_all();
  }
  for (const std::unique_ptr<Warp>& warp : warps_) {
    const std::lock_guard lock(warp->mutex);
    warp->changed.notify_all();
  }
}

void ThreadBlock::count_waiting() {
  if (running_.fetch_sub(1, std::memory_order_relaxed) == 1) {
    if (const std::string reason = stuck(); !reason.empty()) {
      fail(reason);
    }
  }
}

/// Empty if all threads have ended.
std::string ThreadBlock::stuck() {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    text = meeting_.description();
  }
  for (std::size_t number = 0; number < warps_.size(); ++number) {
    const std::lock_guard lock(warps_[number]->mutex);
    if (const std::string waiting = warps_[number]->meeting.description(); !waiting.empty()) {
      text += (text.empty() ? "" : "; ") + ("of warp " + std::to_string(number)) + " " + waiting;
      break;
    }
  }
  return text.empty() ? text : "no thread can go on: " + text;
}

/// Runs some blocks at the same time.
void run_together(std::vector<std::unique_ptr<ThreadBlock>>& blocks) {
  std::vector<std::jthread> threads;
  for (const std::unique_ptr<ThreadBlock>& block : blocks) {
    for (unsigned number = 0; number < block->threads(); ++number) {
      threads.emplace_back([&block, number] { block->run(number); });
    }
  }
  threads.clear();
  for (const std::unique_ptr<ThreadBlock>& block : blocks) {
    if (!block->failure().empty()) {
      throw KernelError(block->failure());
    }
  }
  blocks.clear();
}

}  // namespace

void run_blocks(const Grid& grid, const std::vector<std::uint64_t>& order, const std::function<void()>& thread) {
  constexpr unsigned kThreads = 1024;
  const std::size_t together = std::max(2U, kThreads / grid.threads_of_block());
  std::vector<std::unique_ptr<ThreadBlock>> blocks;
  for (const std::uint64_t number : order) {
    blocks.push_back(std::make_unique<ThreadBlock>(grid, number, thread));
    if (blocks.size() == together) {
      run_together(blocks);
    }
  }
  run_together(blocks);
}

std::uint64_t meet_in_warp(const Operation& operation, const Offer& offer) {
  return t_block->meet_in_warp(t_number, operation, offer);
}

void meet_in_block(const Operation& barrier) { t_block->meet_in_block(barrier); }

void* shared_variable(const void* key, std::size_t bytes, std::size_t alignment) {
  return t_block->find_shared(key, bytes, alignment);
}

}  // namespace emulated_cuda::kernels
