#include "csrc/paging/residency.h"

#include <algorithm>
#include <limits>

namespace hydra {

bool all_fit(std::span<const Use> future, std::span<const Bytes> slot_bytes) {
  std::vector<bool> seen(slot_bytes.size(), false);
  Bytes together = 0;
  Bytes room = std::numeric_limits<Bytes>::max();
  for (const Use& use : future) {
    const auto block = static_cast<std::size_t>(use.block);
    together += seen[block] ? 0 : slot_bytes[block];
    seen[block] = true;
    room = std::min(room, use.room);
  }
  return together <= room;
}

std::vector<std::int32_t> choose_resident(std::span<const Use> future, std::span<const Bytes> slot_bytes,
                                          const std::vector<bool>& resident) {
  std::vector<std::int32_t> chosen;
  if (future.empty()) {
    return chosen;
  }
  const auto size_of = [&](std::int32_t block) { return slot_bytes[static_cast<std::size_t>(block)]; };
  // The bytes that the chosen blocks take at each moment: at least those of the block that is used then.
  std::vector<Bytes> held;
  held.reserve(future.size());
  for (const Use& use : future) {
    held.push_back(size_of(use.block));
  }
  const bool has_room = all_fit(future, slot_bytes);
  std::vector<bool> seen(slot_bytes.size(), false);
  std::size_t distinct = 1;
  bool loads_stopped = false;
  chosen.push_back(future[0].block);
  seen[static_cast<std::size_t>(future[0].block)] = true;
  for (std::size_t when = 1; when < future.size() && distinct < slot_bytes.size(); ++when) {
    const auto block = static_cast<std::size_t>(future[when].block);
    if (seen[block]) {
      continue;
    }
    seen[block] = true;
    ++distinct;
    if (!resident[block] && (loads_stopped || !future[when].loadable)) {
      continue;
    }
    if (has_room) {
      chosen.push_back(future[when].block);
      continue;
    }
    bool fits = true;
    for (std::size_t moment = 0; moment < when && fits; ++moment) {
      fits = held[moment] + slot_bytes[block] <= future[moment].room;
    }
    if (!fits) {
      // A load out of turn would take the room that this block needs; keeping a resident block would not.
      loads_stopped = true;
      continue;
    }
    for (std::size_t moment = 0; moment < when; ++moment) {
      held[moment] += slot_bytes[block];
    }
    chosen.push_back(future[when].block);
  }
  return chosen;
}

}  // namespace hydra
