// How far the bytes in a block's slot are the truth, which else the host has.
//
// A block is dirty once its slot has been written: it has to go home before it can lose the slot. A settled block is at
// home on the device: its slot is the truth until it is unsettled. Writes are counted, so that a copy of
// the bytes can be told from a later state. A write is noted before it is made, by a caller that has pinned the block.
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
  /// The host has no bytes that the slot has not: nothing is lost with the slot.
  bool is_on_host() const noexcept { return !dirty_ && !settled_; }
  /// Calls of note_write() so far.
  std::int64_t writes() const noexcept { return writes_; }
  /// What else the device holds for a settled block, in bytes.
  Bytes beside() const noexcept { return beside_; }

  void note_write() noexcept {
    dirty_ = true;
    ++writes_;
  }
  /// The bytes are home as they were after so many writes.
  void note_written_back(std::int64_t writes) noexcept { dirty_ = dirty_ && writes_ != writes; }
  /// What the slot has is not the truth any more.
  void discard() noexcept { dirty_ = false; }

  void settle(Bytes beside) noexcept {
    settled_ = true;
    beside_ = beside;
  }
  /// The bytes are home as they were after so many writes. False, and nothing has changed, if they have been written
  /// since and the block is not pinned: no window's end would bring them home.
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
