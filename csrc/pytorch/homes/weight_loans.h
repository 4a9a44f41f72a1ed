// Weights on their way from the disk to the device: host memory for each fill, and reads ahead of the fills.
//
// expect() announces fills in the order in which a lane will serve them. The next fill's weights are read while the
// present one is on the lane. A fill that waits for its block's update finds the weights in memory, and reads nothing.
// A fill out of turn takes memory of its own. There is so much memory that begin() never waits for another fill.
// A loan keeps this object alive. Threads: any; only Loan::begin() waits. Sizes are bytes.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "csrc/optim/deferred_update.h"
#include "csrc/pytorch/homes/disk_homes.h"
#include "csrc/pytorch/memory/working_memory.h"

namespace hydra {

class WeightLoans final : public std::enable_shared_from_this<WeightLoans> {
 public:
  static constexpr int kAhead = 1;  // fills whose weights are read before begin()

  class Loan {
   public:
    /// Made by expect().
    Loan(std::shared_ptr<WeightLoans> loans, std::int32_t block, Bytes bytes, std::shared_ptr<DeferredUpdate> update)
        : loans_(std::move(loans)), block_(block), bytes_(bytes), update_(std::move(update)) {}
    ~Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

    /// Blocks until the block is updated and its weights are in memory, and returns them. Returns null if their home is
    /// no longer the disk. Throws SpillError, or the update's error.
    const std::byte* begin();
    /// The loan's memory, of the size that expect() was given; for callers after begin(). Weights read from the disk
    /// are at its beginning.
    std::byte* memory();

   private:
    friend class WeightLoans;
    std::shared_ptr<WeightLoans> loans_;
    const std::int32_t block_;
    const Bytes bytes_;
    std::shared_ptr<DeferredUpdate> update_;
    // Under the mutex.
    bool expected_ = false;  // has memory, and begin() was not called
    ArenaRegionPtr memory_;
    TicketPtr ticket_;
    std::shared_ptr<const std::byte> updated_;
  };

  /// `regions` is the number of memory regions: kAhead more than the most fills between begin() and their end at any
  /// time. The disk homes have to outlive all loans.
  WeightLoans(DiskHomes& disk, std::shared_ptr<HostArena> arena, std::size_t regions)
      : disk_(disk), memory_(std::make_shared<WorkingMemory>(std::move(arena), static_cast<int>(regions))) {}

  /// Announces a fill of the block, in memory of `bytes`, after the block's part of `update`, which may be null.
  std::shared_ptr<Loan> expect(std::int32_t block, Bytes bytes, std::shared_ptr<DeferredUpdate> update);

  Bytes bytes() const { return memory_->bytes(); }
  double wait_seconds() const;

 private:
  void read_ahead_locked() noexcept;

  const HomeProcess home_;
  DiskHomes& disk_;
  std::shared_ptr<WorkingMemory> memory_;
  mutable std::mutex mutex_;
  std::deque<Loan*> waiting_;  // loans without memory
  int expected_ = 0;
  double wait_seconds_ = 0.0;
};

}  // namespace hydra
