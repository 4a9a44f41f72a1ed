// Pins blocks when a pass arrives at them, notes the arrivals, and unpins the blocks when the pass leaves them.
//
// Owns the low-precision copies of blocks in use, and the timeline. A block is pinned from arrive() until leave().
// Threads: any, without the interpreter lock.
#pragma once

#include <atomic>

#include "csrc/pytorch/homes/block_homes.h"
#include "csrc/pytorch/model/memory_timeline.h"
#include "csrc/pytorch/parameters/derived_page.h"

namespace hydra {

class Arrivals {
 public:
  Arrivals(ModelMemory& memory, const ModelBlocks& blocks, Pager& pager)
      : pager_(pager), timeline_(memory, blocks, pager) {}

  /// Pins all blocks, or none if it throws.
  void arrive(const BlockList& blocks, PassKind kind);
  void leave(const BlockList& blocks) noexcept;
  void leave(std::int32_t block) noexcept;
  /// Drops the low-precision copies of these blocks. The next microbatch makes its own.
  void drop_copies(const BlockList& blocks) noexcept;

  /// Sets the version of the passes that begin from now on. Each version of the weights has blocks of its own.
  void set_version(int version) noexcept { version_ = version; }
  int version() const noexcept { return version_; }

  MemoryTimeline& timeline() noexcept { return timeline_; }
  DerivedPages& derived_pages() noexcept { return derived_pages_; }
  /// The number of low-precision copies that were dropped. They are cast again when an operation needs them.
  std::int64_t dropped_copies() const noexcept { return dropped_copies_; }

 private:
  Pager& pager_;
  MemoryTimeline timeline_;
  DerivedPages derived_pages_;
  std::atomic<std::int64_t> dropped_copies_{0};
  std::atomic<int> version_{0};
};

}  // namespace hydra
