// Chooses which blocks should have slots now, given the uses to come: a pure function.
//
// Blocks are considered by their nearest use, under a limit that changes along the way as activations grow and shrink.
// A block gets a slot only if it fits at every moment until its next use. Under a constant limit this keeps and evicts
// as Belady's rule does, and prefetches in the order of use.
#pragma once

#include <span>
#include <vector>

#include "csrc/base/types.h"

namespace hydra {

/// One moment of the future: the block in use, and the bytes that all slots together may take meanwhile.
struct Use {
  std::int32_t block = 0;
  Bytes room = 0;
  /// Whether the use lies in the window that is open now. Host weights may change before a later window, so nothing is
  /// loaded for its uses; resident blocks may be kept for them.
  bool loadable = true;
};

/// Whether there is room for all blocks of the future at every moment. Most often it is so, and told in one pass.
bool all_fit(std::span<const Use> future, std::span<const Bytes> slot_bytes);

/// `future[0]`: the use now. `resident[b]`: whether block b has valid bytes in a slot, or is being loaded.
/// Returns the blocks that should have a slot, nearest use first, always including `future[0].block`.
std::vector<std::int32_t> choose_resident(std::span<const Use> future, std::span<const Bytes> slot_bytes,
                                          const std::vector<bool>& resident);

}  // namespace hydra
