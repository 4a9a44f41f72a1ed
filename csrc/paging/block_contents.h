// What happens to a block's bytes: they are written, on the host or in the slot, settle on the device, and go home.
//
// A part of the pager. Knows the table and the device's lanes; owns nothing. Threads: any; the table's mutex. Nothing
// waits under it. invalidate() and write_back_dirty() wait for lanes, so they must not be called with the interpreter
// lock held. In a forked child these two throw StateError. Sizes are bytes.
#pragma once

#include <vector>

#include "csrc/paging/block_table.h"

namespace hydra {

/// Snapshot of a slot, for readers outside the pager.
struct SlotContents {
  void* memory = nullptr;
  std::vector<FencePtr> uses;  // compute of other threads that may still write it
  std::int64_t writes = 0;     // calls of mark_dirty() so far; -1 while one may be under way
};

class BlockContents {
 public:
  /// Both have to outlive it.
  BlockContents(DeviceBackend& backend, BlockTable& table) noexcept : backend_(backend), table_(table) {}
  BlockContents(const BlockContents&) = delete;
  BlockContents& operator=(const BlockContents&) = delete;

  /// The host's bytes have changed: what a slot holds is no longer valid.
  void invalidate(std::int32_t block);

  /// Compute up to `written` has written the slot of a block that is settled, or acquired: an acquirer follows it.
  void note_written(std::int32_t block, const FencePtr& written);
  /// The slot's bytes have changed: write_back_dirty() has to bring them home before the block can go.
  void mark_dirty(std::int32_t block);
  /// Blocks until the bytes of every dirty block that is not pinned are home.
  void write_back_dirty();

  /// The block is acquired and keeps its slot, whose bytes are the truth, until unsettle(). Plans leave it and `beside`
  /// more bytes of the device to it.
  void settle(std::int32_t block, Bytes beside);
  /// Its bytes are home, as of() told them. False, and nothing has changed, if they have been written since: they are
  /// to be read again. While compute is at it they are not; then the block is dirty.
  [[nodiscard]] bool unsettle(std::int32_t block, std::int64_t writes) noexcept;
  /// The settled block that is needed last; -1 when there is none.
  std::int32_t last_needed_settled() const;
  /// Of a block that is settled, or acquired.
  SlotContents of(std::int32_t block) const;

 private:
  DeviceBackend& backend_;
  BlockTable& table_;
};

}  // namespace hydra
