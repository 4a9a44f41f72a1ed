// A pass arrives at blocks and leaves them: they are pinned, noted, and unpinned.
//
// Owns the low-precision copies of blocks in use, and the timeline. What was arrived at stays pinned until it is left.
// Threads: any, without the interpreter lock.
#pragma once

#include <atomic>

#include "csrc/pytorch/homes/block_homes.h"
#include "csrc/pytorch/model/memory_timeline.h"
#include "csrc/pytorch/parameters/derived_page.h"

namespace hydra {

class Arrivals {
 public:
  Arrivals(ModelMemory& memory, const ModelBlocks& blocks, Pager& pager, BlockHomes& homes)
      : memory_(memory), pager_(pager), homes_(homes), timeline_(memory, blocks, pager) {}

  /// All blocks or none.
  void arrive(const BlockList& blocks, PassKind kind);
  void leave(const BlockList& blocks) noexcept;
  /// Drops the low-precision copies of these blocks: the next microbatch makes its own.
  void drop_copies(const BlockList& blocks) noexcept;
  /// On a device whose allocator cannot wait for room, homes make it in time.
  void keep_headroom();

  /// Where weights have several versions, each with blocks of its own: passes that begin from now on are of this one.
  void set_version(int version) noexcept { version_ = version; }
  int version() const noexcept { return version_; }

  MemoryTimeline& timeline() noexcept { return timeline_; }
  DerivedPages& derived_pages() noexcept { return derived_pages_; }
  /// Low-precision copies that were dropped, to be cast anew.
  std::int64_t dropped_copies() const noexcept { return dropped_copies_; }

 private:
  ModelMemory& memory_;
  Pager& pager_;
  BlockHomes& homes_;
  MemoryTimeline timeline_;
  DerivedPages derived_pages_;
  std::atomic<std::int64_t> dropped_copies_{0};
  std::atomic<int> version_{0};
};

}  // namespace hydra
