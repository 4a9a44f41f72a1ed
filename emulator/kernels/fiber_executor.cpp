// The executor that runs the threads of a block as fibers of the calling thread. At each meeting the next fiber is
// drawn from those that can go on: now from all, until the next barrier from those that became ready last, so that one
// warp runs far ahead of the others. When none can go on, and some have not ended, the block is stuck.
#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "emulator/kernels/block.h"
#include "emulator/kernels/fiber.h"

namespace emulated_cuda::kernels {

namespace {

class FiberBlock {
 public:
  FiberBlock(const Grid& grid, std::uint64_t number, const std::function<void()>& thread, Stacks& stacks);

  void run();
  std::uint64_t meet_in_warp(const Operation& operation, const Offer& offer);
  void meet_in_block(const Operation& barrier);
  SharedMemory& shared() noexcept { return shared_; }

 private:
  struct Thread {
    Fiber fiber;
    uint3 index;
    bool started = false;
    bool ended = false;
  };

  static void enter();
  void make_ready();
  void run_thread() noexcept;
  void fail(const std::string& reason) noexcept;
  Fiber& next();
  void suspend();
  void abandon();
  std::string stuck() const;
  WarpMeeting& warp() { return warps_[current_ / kWarpLanes]; }

  const Grid& grid_;
  const std::function<void()>& thread_;
  const uint3 index_;
  Random random_;
  SharedMemory shared_;
  BlockMeeting meeting_;
  std::vector<WarpMeeting> warps_;
  std::vector<Thread> threads_;
  std::vector<unsigned> ready_;  // what became ready last is at the end
  unsigned window_ = 0;          // the next fiber is one of so many at the end
  Fiber outside_;
  unsigned current_ = 0;
  unsigned ended_ = 0;
  std::string failure_;
};

thread_local FiberBlock* t_block = nullptr;

FiberBlock::FiberBlock(const Grid& grid, std::uint64_t number, const std::function<void()>& thread, Stacks& stacks)
    : grid_(grid),
      thread_(thread),
      index_(coordinates(number, grid.blocks)),
      random_(grid.seed ^ Random(number + 1).next()),
      shared_(random_.next()),
      meeting_(grid.threads_of_block()),
      threads_(grid.threads_of_block()) {
  const auto count = static_cast<unsigned>(threads_.size());
  for (unsigned first = 0; first < count; first += kWarpLanes) {
    warps_.emplace_back(count - first < kWarpLanes ? count - first : kWarpLanes);
  }
  for (unsigned thread_number = 0; thread_number < count; ++thread_number) {
    Thread& made = threads_[thread_number];
    made.index = coordinates(thread_number, grid.threads);
    made.fiber.prepare(stacks.at(thread_number), &FiberBlock::enter);
  }
  make_ready();
}

/// All threads, warp by warp, in an order of the seed.
void FiberBlock::make_ready() {
  constexpr std::array kWindows = {8U, kWarpLanes, ~0U};
  window_ = kWindows[random_.below(kWindows.size())];
  const auto count = static_cast<unsigned>(threads_.size());
  std::vector<unsigned> warps(warps_.size());
  std::iota(warps.begin(), warps.end(), 0);
  random_.shuffle(std::span(warps));
  ready_.reserve(count);
  for (const unsigned warp : warps) {
    const std::size_t first = ready_.size();
    for (unsigned number = warp * kWarpLanes; number < std::min(count, (warp + 1) * kWarpLanes); ++number) {
      ready_.push_back(number);
    }
    random_.shuffle(std::span(ready_).subspan(first));
  }
}

void FiberBlock::run() {
  t_block = this;
  gridDim = grid_.blocks;
  blockDim = grid_.threads;
  blockIdx = index_;
  outside_.switch_to(next());
  if (failure_.empty() && ended_ < threads_.size()) {
    fail(stuck());
  }
  if (!failure_.empty()) {
    abandon();
    throw KernelError(failure_);
  }
}

std::uint64_t FiberBlock::meet_in_warp(const Operation& operation, const Offer& offer) {
  const unsigned lane = current_ % kWarpLanes;
  const unsigned first = current_ - lane;
  for (LaneMask released = warp().arrive(lane, operation, offer); released != 0; released &= released - 1) {
    ready_.push_back(first + static_cast<unsigned>(std::countr_zero(released)));
  }
  suspend();
  return warp().result(lane);
}

void FiberBlock::meet_in_block(const Operation& barrier) {
  if (meeting_.arrive(barrier)) {
    make_ready();
  }
  suspend();
}

void FiberBlock::enter() {
  FiberBlock& block = *t_block;
  Thread& own = block.threads_[block.current_];
  block.run_thread();
  own.fiber.leave_for(block.next());
}

void FiberBlock::run_thread() noexcept {
  Thread& own = threads_[current_];
  own.started = true;
  try {
    thread_();
    warp().end(current_ % kWarpLanes);
    meeting_.end();
  } catch (const Abandoned&) {
  } catch (const std::exception& error) {
    fail(error.what());
  } catch (...) {
    fail("a thread threw something");
  }
  own.ended = true;
  ++ended_;
}

void FiberBlock::fail(const std::string& reason) noexcept { failure_ = failure_of(grid_, index_, reason); }

/// The fiber to go on with: one that is ready, or the one outside if there is none, or the block has failed.
Fiber& FiberBlock::next() {
  if (ready_.empty() || !failure_.empty()) {
    return outside_;
  }
  const auto count = static_cast<unsigned>(ready_.size());
  unsigned& drawn = ready_[count - 1 - random_.below(std::min(count, window_))];
  current_ = drawn;
  drawn = ready_.back();
  ready_.pop_back();
  threadIdx = threads_[current_].index;
  return threads_[current_].fiber;
}

void FiberBlock::suspend() {
  Fiber& own = threads_[current_].fiber;
  Fiber& other = next();
  if (&other != &own) {
    own.switch_to(other);
  }
  if (!failure_.empty()) {
    throw Abandoned{};
  }
}

/// Ends the threads that wait, so that what they own is destroyed.
void FiberBlock::abandon() {
  for (current_ = 0; current_ < threads_.size(); ++current_) {
    if (threads_[current_].started && !threads_[current_].ended) {
      outside_.switch_to(threads_[current_].fiber);
    }
  }
}

std::string FiberBlock::stuck() const {
  std::string text = "no thread can go on: " + meeting_.description();
  for (std::size_t number = 0; number < warps_.size(); ++number) {
    if (const std::string waiting = warps_[number].description(); !waiting.empty()) {
      return text + (text.ends_with(" ") ? "" : "; ") + "of warp " + std::to_string(number) + " " + waiting;
    }
  }
  return text;
}

}  // namespace

void run_blocks(const Grid& grid, const std::vector<std::uint64_t>& order, const std::function<void()>& thread) {
  thread_local Stacks stacks;
  stacks.reserve(grid.threads_of_block());
  const DeviceFloats floats;
  for (const std::uint64_t number : order) {
    FiberBlock(grid, number, thread, stacks).run();
  }
}

std::uint64_t meet_in_warp(const Operation& operation, const Offer& offer) {
  return t_block->meet_in_warp(operation, offer);
}

void meet_in_block(const Operation& barrier) { t_block->meet_in_block(barrier); }

void* shared_variable(const void* key, std::size_t bytes, std::size_t alignment) {
  return t_block->shared().find(key, bytes, alignment);
}

}  // namespace emulated_cuda::kernels
