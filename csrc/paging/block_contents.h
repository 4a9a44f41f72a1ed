// Tracks the bytes of blocks: which copy is the truth, and how it comes home.
//
// A part of the pager. Uses the table and the device's lanes; owns no memory. Threads: any; the table's mutex, under
// which no lane is waited for. invalidate() and write_back_dirty() wait for lanes, so they must not be called with the
// interpreter lock held. In a forked child these two throw StateError. Sizes are bytes.
#pragma once

#include <vector>

#include "csrc/paging/block_table.h"

namespace hydra {

/// A snapshot of a slot for readers outside the pager.
struct SlotContents {
  void* memory = nullptr;
  std::vector<FencePtr> uses;  // compute that may still use the slot: a reader waits for it
  std::int64_t writes = 0;     // calls of mark_dirty() so far; -1 while one may be under way
};

class BlockContents {
 public:
  /// Both have to outlive the object.
  BlockContents(DeviceBackend& backend, BlockTable& table) noexcept : backend_(backend), table_(table) {}
  BlockContents(const BlockContents&) = delete;
  BlockContents& operator=(const BlockContents&) = delete;

  /// The host's bytes have changed: the block's slot, if it has one, becomes stale.
  void invalidate(std::int32_t block);

  /// Compute up to `written` writes the slot of a settled or acquired block: later acquirers wait for it.
  void note_written(std::int32_t block, const FencePtr& written);
  /// The slot's bytes have changed: write_back_dirty() has to bring them home before the block can be evicted.
  void mark_dirty(std::int32_t block);
  /// Blocks until the bytes of every dirty block that is not pinned are home. Throws the first error once no lane
  /// writes the host any more; blocks whose bytes did not get home stay dirty.
  void write_back_dirty();

  /// An acquired block keeps its slot, whose bytes are the truth, until unsettle(). Plans reserve the slot, and
  /// `beside` more bytes of the device, for it.
  void settle(std::int32_t block, Bytes beside);
  /// The block's bytes have reached the host as of() gave them, with its `writes`. If the slot was written since, the
  /// result depends on pins. Without one, returns false and changes nothing: the caller has to read the slot again.
  /// With one, the block unsettles and stays dirty.
  [[nodiscard]] bool unsettle(std::int32_t block, std::int64_t writes) noexcept;
  /// The settled block that is needed last; -1 if none is settled.
  std::int32_t last_needed_settled() const;
  /// The slot of a block that is settled or acquired.
  SlotContents of(std::int32_t block) const;

 private:
  DeviceBackend& backend_;
  BlockTable& table_;
};

}  // namespace hydra
