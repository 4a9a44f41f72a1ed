#include "csrc/paging/slot.h"

#include <utility>

namespace hydra {

void SlotUses::end_use(FencePtr fence, bool covers_all) {
  if (fence) {
    forget_reached();
    fences_.push_back(std::move(fence));
  }
  is_uncovered_ = !covers_all;
}

void SlotUses::note_written(const FencePtr& written) {
  fences_.push_back(written);
  written_ = written;
}

void SlotUses::cover(DeviceBackend& backend) {
  if (is_uncovered_) {
    fences_.push_back(backend.record());
    is_uncovered_ = false;
  }
}

void SlotUses::forget_reached() noexcept {
  std::erase_if(fences_, [](const FencePtr& use) { return !use || use->reached(); });
}

std::vector<FencePtr> SlotUses::hand_over() noexcept {
  written_ = nullptr;
  is_uncovered_ = false;
  return std::exchange(fences_, {});
}

}  // namespace hydra
