// The blocks of one pager, and the mutex under which they change.
//
// A function that needs the mutex held takes a Lock as the proof. The thread that has it allocates and releases no slot
// memory, and waits for no lane. So the pager may be called from inside an allocation. A thread that waits for another
// thread's reservation waits here.
//
// Owns the blocks, whose addresses never change. They are added before the first pass; from then on the list is read
// without the mutex. Once the table is closed, no fill begins. home() tells a forked child, where no thread may wait.
// Threads: any.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/paging/paged_block.h"
#include "csrc/paging/pager_statistics.h"

namespace hydra {

class BlockTable {
 public:
  using Lock = std::unique_lock<std::mutex>;

  BlockTable() = default;
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  /// Adds a block, before the first pass. Returns its number.
  std::int32_t add(std::string name, Bytes bytes, std::unique_ptr<BlockClient> client);
  /// Throws StateError if there is no such block.
  PagedBlock& at(std::int32_t block) const;
  const std::vector<std::unique_ptr<PagedBlock>>& all() const noexcept { return blocks_; }

  Lock lock() const { return Lock(mutex_); }
  /// Sleeps until note_change(). May wake without a change.
  void wait_for_change(Lock& lock) { changed_->wait(lock); }
  /// Wakes the threads that wait: a block's state has changed, or the table was closed.
  void note_change(const Lock& /*lock*/) noexcept { changed_->notify_all(); }

  bool is_closed(const Lock& /*lock*/) const noexcept { return closed_; }
  void close(const Lock& lock) noexcept {
    closed_ = true;
    note_change(lock);
  }

  PagerStatistics& statistics(const Lock& /*lock*/) noexcept { return statistics_; }
  const PagerStatistics& statistics(const Lock& /*lock*/) const noexcept { return statistics_; }
  const HomeProcess& home() const noexcept { return home_; }

 private:
  const HomeProcess home_;
  mutable std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  std::vector<std::unique_ptr<PagedBlock>> blocks_;
  bool closed_ = false;
  PagerStatistics statistics_;
};

}  // namespace hydra
