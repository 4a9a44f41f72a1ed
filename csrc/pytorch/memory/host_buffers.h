// Host memory for what comes and goes every step in the same sizes: buffers that are used again.
//
// Mapping, touching and pinning memory takes longer than copying to it. A buffer that is given back is kept for the
// next one of its size; what is kept and what is lent together never take more than was ever lent at one time, but for
// the buffer that is asked for. Threads: any. Buffers keep the pool, and the pool the arena, alive.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/pytorch/memory/arena_region.h"

namespace hydra {

class HostBuffers final : public std::enable_shared_from_this<HostBuffers> {
 public:
  explicit HostBuffers(std::shared_ptr<HostArena> arena) : arena_(std::move(arena)) {}

  /// Of `bytes`, its content undefined. Throws OutOfMemory.
  ArenaRegionPtr take(Bytes bytes);
  /// Gives what is not lent back to the arena, now and from now on as soon as it comes.
  void close() noexcept;

  Bytes lent_bytes() const;
  Bytes kept_bytes() const;

 private:
  void give_back(std::unique_ptr<ArenaRegion> region) noexcept;
  /// Takes out of the pool what has to go, so that there is room for so many more bytes. Under the mutex.
  std::vector<std::unique_ptr<ArenaRegion>> make_room(Bytes bytes);

  std::shared_ptr<HostArena> arena_;
  mutable std::mutex mutex_;
  std::multimap<Bytes, std::unique_ptr<ArenaRegion>> kept_;
  Bytes kept_bytes_ = 0;
  Bytes lent_bytes_ = 0;
  Bytes most_lent_ = 0;
  bool closed_ = false;
};

}  // namespace hydra
