// A pool of host buffers that are used again in every step, in the same sizes or similar ones.
//
// Mapping, touching and pinning memory takes longer than copying to it, so the pool keeps returned buffers for the next
// request of their size. Without a limit, sizes are rounded up to classes, eight to each power of two, and a buffer
// also serves somewhat smaller requests, since batches may be longer or shorter than the one before. Kept and lent
// buffers together never exceed the most bytes that were lent at one time, except by the buffer that is requested. With
// a limit, they and buffers that are being unmapped never exceed it. Buffers keep the pool alive, and the pool keeps
// the arena alive. Sizes are bytes, rounded up to the pages that are mapped. Thread-safe.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/pytorch/memory/arena_region.h"

namespace hydra {

class HostBuffers final : public std::enable_shared_from_this<HostBuffers> {
 public:
  explicit HostBuffers(std::shared_ptr<HostArena> arena) : arena_(std::move(arena)) {}

  /// Limits the pool from now on. Called before buffers are lent.
  void limit(Bytes bytes);
  /// Returns a buffer of at least `bytes` with undefined contents. Throws OutOfMemory.
  ArenaRegionPtr take(Bytes bytes);
  /// Returns kept buffers to the arena now, and lent ones as soon as they are returned.
  void close() noexcept;

  Bytes lent_bytes() const;
  Bytes kept_bytes() const;
  /// The most that were mapped at one time.
  Bytes peak_bytes() const;

 private:
  static constexpr Bytes kUnlimited = std::numeric_limits<Bytes>::max();

  void give_back(std::unique_ptr<ArenaRegion> region) noexcept;
  /// Removes and returns the buffers that have to be released to make room for `bytes`. Under the mutex.
  std::vector<std::unique_ptr<ArenaRegion>> make_room(Bytes bytes);

  std::shared_ptr<HostArena> arena_;
  mutable std::mutex mutex_;
  std::multimap<Bytes, std::unique_ptr<ArenaRegion>> kept_;
  Bytes kept_bytes_ = 0;
  Bytes lent_bytes_ = 0;
  Bytes going_bytes_ = 0;  // of buffers that are being unmapped
  Bytes most_lent_ = 0;
  Bytes peak_bytes_ = 0;
  Bytes limit_ = kUnlimited;
  bool closed_ = false;
};

}  // namespace hydra
