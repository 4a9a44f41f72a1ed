#include "csrc/pytorch/model/arrivals.h"

#include "csrc/base/device_turns.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

void Arrivals::arrive(const BlockList& blocks, PassKind kind) {
  std::size_t arrived = 0;
  try {
    for (; arrived < blocks.size(); ++arrived) {
      timeline_.approach(blocks[arrived]);
      pager_.passes().arrive(blocks[arrived]);
      timeline_.note_arrival(blocks[arrived], kind);
    }
  } catch (...) {  // re-raised: all or none
    leave({blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(arrived)});
    rethrow_for_torch(timeline_.explain());
  }
  DeviceTurns::offer();
}

void Arrivals::leave(const BlockList& blocks) noexcept {
  for (const std::int32_t block : blocks) {
    leave(block);
  }
}

void Arrivals::leave(std::int32_t block) noexcept {
  dropped_copies_ += derived_pages_.drop(block);
  pager_.release(block, AcquireReason::kHook);
}

void Arrivals::drop_copies(const BlockList& blocks) noexcept {
  for (const std::int32_t block : blocks) {
    dropped_copies_ += derived_pages_.drop(block);
  }
}

}  // namespace hydra
