// Host memory where pieces of gradients land before they are added to a sum. A few pieces, used in turn, serve sums of
// any size.
//
// A piece is free again when the lane has added its contents. The lane ends its jobs in order, with at most `in_flight`
// of them between their first byte and their end. So in_flight + 1 pieces are enough, and no thread waits for one.
// Pieces serve jobs of one lane and one priority, submitted in the order of next(). One thread at a time.
#pragma once

#include <memory>
#include <vector>

#include "csrc/pytorch/memory/arena_region.h"

namespace hydra {

class LandingRing {
 public:
  static constexpr Bytes kPieceBytes = 4 * kMiB;

  LandingRing(std::shared_ptr<HostArena> arena, std::size_t in_flight)
      : arena_(std::move(arena)), pieces_(in_flight + 1) {}

  /// Returns the next piece of kPieceBytes. Allocates it at its first use.
  ArenaRegionPtr next() {
    ArenaRegionPtr& piece = pieces_[next_++ % pieces_.size()];
    if (!piece) {
      piece = std::make_shared<ArenaRegion>(arena_, kPieceBytes);
    }
    return piece;
  }

 private:
  std::shared_ptr<HostArena> arena_;
  std::vector<ArenaRegionPtr> pieces_;
  std::size_t next_ = 0;
};

}  // namespace hydra
