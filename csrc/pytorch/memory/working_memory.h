// Working memory: a fixed number of host regions, lent in turns to bytes on their way to or from the disk.
//
// A returned region is lent again. A region that is too small is replaced by a larger one. A thread that finds none
// waits until one is returned. Regions keep this object alive, which keeps the arena alive. Thread-safe. Sizes are
// bytes.
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

  /// Returns a region of at least `bytes`. Waits until a region is free; without `wait`, returns null if none is free.
  /// Throws OutOfMemory.
  ArenaRegionPtr take(Bytes bytes, bool wait = true);

  /// The bytes of all regions, lent or not.
  Bytes bytes() const;
  /// The seconds that threads have waited for regions.
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
