#include "csrc/paging/paged_block.h"

#include <exception>
#include <utility>

namespace hydra {

bool PagedBlock::goes_before(const PagedBlock& other) const noexcept {
  if (outlook.wanted != other.outlook.wanted) {
    return other.outlook.wanted;
  }
  const bool is_stale = place.state() == BlockState::kStale;
  if (is_stale != (other.place.state() == BlockState::kStale)) {
    return is_stale;
  }
  if (outlook.next_use != other.outlook.next_use) {
    return outlook.next_use > other.outlook.next_use;
  }
  return outlook.last_arrival < other.outlook.last_arrival;
}

void PagedBlock::end_use(DeviceBackend& backend, AcquireReason reason) noexcept {
  const bool at_exit = reason == AcquireReason::kHook;
  try {
    if (place.memory() != nullptr) {
      backend.note_read(place.memory(), place.bytes());
    }
    // Leaving a block records a fence. Single operations are covered by the next one, or by one recorded at eviction.
    FencePtr fence = at_exit ? backend.record() : backend.record_use();
    place.uses().end_use(std::move(fence), /*covers_all=*/at_exit);
  } catch (const std::exception&) {
    place.uses().note_use();  // the one that is made at eviction has to cover this use
  }
  unpin();
}

}  // namespace hydra
