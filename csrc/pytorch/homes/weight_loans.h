// Weights on their way from the disk to the device: host memory for each fill, and reads that run ahead.
//
// Fills are expected in the order in which a lane will serve them; the next one's weights are read while the one before
// is on the lane. A fill that waits for its block's update finds them in memory, and reads nothing. One that comes out
// of turn takes memory of its own: there is so much that begin() never waits for another fill. Threads: any;
// only Loan::begin() waits. A loan keeps this alive.
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
  static constexpr int kAhead = 1;  // read before they are begun

  class Loan {
   public:
    /// See expect().
    Loan(std::shared_ptr<WeightLoans> loans, std::int32_t block, Bytes bytes, std::shared_ptr<DeferredUpdate> update)
        : loans_(std::move(loans)), block_(block), bytes_(bytes), update_(std::move(update)) {}
    ~Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

    /// Blocks until the block is updated and its weights are here. Null if they are not on the disk any more. Throws
    /// SpillError, or why the update failed.
    const std::byte* begin();
    /// As many bytes as were asked for, from begin() on; of what is read, which begin() returns, the first ones.
    std::byte* memory();

   private:
    friend class WeightLoans;
    std::shared_ptr<WeightLoans> loans_;
    const std::int32_t block_;
    const Bytes bytes_;
    std::shared_ptr<DeferredUpdate> update_;
    // The rest under the mutex.
    bool expected_ = false;  // has memory, and has not begun
    ArenaRegionPtr memory_;
    TicketPtr ticket_;
    std::shared_ptr<const std::byte> updated_;
  };

  /// `regions`: of memory; kAhead more than there are fills between their begin() and their end at any time. The disk
  /// has to outlive all loans.
  WeightLoans(DiskHomes& disk, std::shared_ptr<HostArena> arena, std::size_t regions)
      : disk_(disk), memory_(std::make_shared<WorkingMemory>(std::move(arena), static_cast<int>(regions))) {}

  /// A fill of the block will begin, in memory of so many bytes; after its part in the update, which may be null.
  std::shared_ptr<Loan> expect(std::int32_t block, Bytes bytes, std::shared_ptr<DeferredUpdate> update);

  Bytes bytes() const { return memory_->bytes(); }
  double wait_seconds() const;

 private:
  void read_ahead_locked() noexcept;

  const HomeProcess home_;
  DiskHomes& disk_;
  std::shared_ptr<WorkingMemory> memory_;
  mutable std::mutex mutex_;
  std::deque<Loan*> waiting_;  // without memory
  int expected_ = 0;
  double wait_seconds_ = 0.0;
};

}  // namespace hydra
