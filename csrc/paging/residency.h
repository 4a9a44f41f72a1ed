// Which blocks should be in slots now, given what will be used next: a pure function.
//
// Nearest use first, under a limit that changes along the way (activations grow and shrink): a block is
// worth a slot only if it fits at every moment until its next use. On a limit that does not change this
// keeps and evicts as Belady's rule does, and prefetches in the order of use.
#pragma once

#include <span>
#include <vector>

#include "csrc/base/types.h"

namespace hydra {

/// One moment of the future: the block that is used, and the bytes that slots may hold while it is.
struct Use {
  std::int32_t block = 0;
  Bytes room = 0;
  /// Inside the window that is open now. Host weights may change before a later one, so that nothing is
  /// loaded for it; what is there may be kept for it.
  bool loadable = true;
};

/// `future[0]` is what is used now. `resident[b]` says that block b has valid bytes in a slot.
/// Returns the blocks that should hold or get a slot, nearest use first, `future[0].block` always among them.
std::vector<std::int32_t> choose_resident(std::span<const Use> future, std::span<const Bytes> slot_bytes,
                                          const std::vector<bool>& resident);

}  // namespace hydra
