#include "csrc/pytorch/memory/working_memory.h"

#include <algorithm>
#include <utility>

#include "csrc/base/clock.h"

namespace hydra {

ArenaRegionPtr WorkingMemory::take_idle_locked(Bytes bytes) {
  if (idle_.empty()) {
    return nullptr;
  }
  const auto fitting = std::find_if(idle_.begin(), idle_.end(),
                                    [bytes](const ArenaRegionPtr& region) { return region->bytes() >= bytes; });
  const auto chosen = fitting == idle_.end() ? idle_.begin() : fitting;
  ArenaRegionPtr region = std::move(*chosen);
  idle_.erase(chosen);
  if (region->bytes() >= bytes) {
    return region;
  }
  bytes_ -= region->bytes();
  --regions_;
  return nullptr;
}

ArenaRegionPtr WorkingMemory::take(Bytes bytes, bool wait) {
  ArenaRegionPtr region;
  {
    std::unique_lock lock(mutex_);
    for (;;) {
      region = take_idle_locked(bytes);
      if (region || regions_ < most_) {
        break;
      }
      if (!wait) {
        return nullptr;
      }
      const Clock::time_point begin = Clock::now();
      returned_.wait(lock);
      wait_seconds_ += seconds_since(begin);
    }
    if (!region) {
      ++regions_;
      bytes_ += bytes;
    }
  }
  if (!region) {
    try {
      region = std::make_shared<ArenaRegion>(arena_, bytes);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      --regions_;
      bytes_ -= bytes;
      throw;
    }
  }
  ArenaRegion* const lent = region.get();
  return {lent, [pool = shared_from_this(), region = std::move(region)](ArenaRegion*) mutable {
            if (!pool->home_.here()) {
              return;  // in a forked child, the thread that holds the mutex may be missing
            }
            const std::lock_guard lock(pool->mutex_);
            pool->idle_.push_back(std::move(region));
            pool->returned_.notify_all();
          }};
}

Bytes WorkingMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

double WorkingMemory::wait_seconds() const {
  const std::lock_guard lock(mutex_);
  return wait_seconds_;
}

}  // namespace hydra
