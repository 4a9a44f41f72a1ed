// Host memory that is lent in turns, so many regions at a time: for bytes on their way to or from the disk.
//
// A region that comes back is lent again; one that is too small goes, for a larger one. A thread that finds none waits
// for one to come back. Threads: any. Regions keep this alive, and this the arena.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/pytorch/memory/arena_region.h"

namespace hydra {

class WorkingMemory final : public std::enable_shared_from_this<WorkingMemory> {
 public:
  WorkingMemory(std::shared_ptr<HostArena> arena, int regions) : arena_(std::move(arena)), most_(regions) {}

  /// At least so many bytes. Waits until there is a region; null if `wait` is false and there is none. Throws
  /// OutOfMemory.
  ArenaRegionPtr take(Bytes bytes, bool wait = true);

  /// Of all regions, lent or not.
  Bytes bytes() const;
  /// How long it was waited for.
  double wait_seconds() const;

 private:
  ArenaRegionPtr take_idle_locked(Bytes bytes);

  const HomeProcess home_;
  std::shared_ptr<HostArena> arena_;
  const int most_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<ArenaRegionPtr> idle_;
  int regions_ = 0;
  Bytes bytes_ = 0;
  double wait_seconds_ = 0.0;
};

}  // namespace hydra
