// Host memory where pieces of gradients land before they are added to a sum: a few pieces, used in turn, so that sums
// of any size need no more.
//
// A piece is free again when the lane has added what landed in it. The lane ends its jobs in order, at most `in_flight`
// of them between their first byte and their end, so one piece more than that is enough, without a wait. Pieces
// are for jobs of one lane and one priority, submitted in the order of next(). One thread at a time.
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

  /// Of kPieceBytes; made when first used.
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
