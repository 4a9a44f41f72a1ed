// Whether a block's slot has bytes that the host lacks.
//
// A block is dirty once its slot has been written: the bytes have to be written back before the block can be evicted. A
// settled block is at home on the device: its slot is the truth until it unsettles. Writes are counted, so that a copy
// can be told from later bytes. A caller pins the block and calls note_write() before it writes.
//
// Not thread-safe: the pager's mutex guards it.
#pragma once

#include <cstdint>

#include "csrc/base/types.h"

namespace hydra {

class SlotTruth {
 public:
  bool is_dirty() const noexcept { return dirty_; }
  bool is_settled() const noexcept { return settled_; }
  /// Whether the host has the truth: no bytes are lost with the slot.
  bool is_on_host() const noexcept { return !dirty_ && !settled_; }
  /// Calls of note_write() so far.
  std::int64_t writes() const noexcept { return writes_; }
  /// While settled: other bytes that the device holds for the block.
  Bytes beside() const noexcept { return beside_; }

  void note_write() noexcept {
    dirty_ = true;
    ++writes_;
  }
  /// The host has the bytes as they were after this many writes. They stay dirty if they were written since.
  void note_written_back(std::int64_t writes) noexcept { dirty_ = dirty_ && writes_ != writes; }
  /// The slot's writes are not the truth any more.
  void discard() noexcept { dirty_ = false; }

  void settle(Bytes beside) noexcept {
    settled_ = true;
    beside_ = beside;
  }
  /// The host has the bytes as they were after this many writes. If the slot was written since, a pinned block stays
  /// dirty. Without a pin, returns false and changes nothing: no end of a window would bring the written bytes home.
  [[nodiscard]] bool unsettle(std::int64_t writes, bool is_pinned) noexcept {
    const bool written = dirty_ && writes_ != writes;
    if (written && !is_pinned) {
      return false;
    }
    settled_ = false;
    dirty_ = written;
    beside_ = 0;
    return true;
  }

 private:
  bool dirty_ = false;
  bool settled_ = false;
  Bytes beside_ = 0;
  std::int64_t writes_ = 0;
};

}  // namespace hydra
