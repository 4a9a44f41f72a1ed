#include "csrc/pytorch/memory/host_buffers.h"

#include <algorithm>
#include <bit>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

constexpr Bytes kClassesPerPower = 8;
constexpr Bytes kSpareDivisor = 4;  // a buffer serves a request that leaves up to a fifth of it unused

Bytes size_class(Bytes bytes) {
  const auto power = static_cast<Bytes>(std::bit_floor(static_cast<std::uint64_t>(bytes)));
  return HostArena::mapped_for(round_up(bytes, std::max<Bytes>(power / kClassesPerPower, 1)));
}

}  // namespace

void HostBuffers::limit(Bytes bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
}

ArenaRegionPtr HostBuffers::take(Bytes asked) {
  Bytes bytes = 0;
  std::unique_ptr<ArenaRegion> region;
  std::vector<std::unique_ptr<ArenaRegion>> gone;  // destroyed, and unmapped, without the mutex
  Bytes going = 0;
  {
    const std::lock_guard lock(mutex_);
    bytes = limit_ == kUnlimited ? size_class(asked) : HostArena::mapped_for(asked);
    const auto found = kept_.lower_bound(bytes);
    if (found != kept_.end() && found->first <= (limit_ == kUnlimited ? bytes + bytes / kSpareDivisor : bytes)) {
      bytes = found->first;
      region = std::move(found->second);
      kept_.erase(found);
      kept_bytes_ -= bytes;
    } else {
      HYDRA_EXPECT(bytes <= limit_ - lent_bytes_ - going_bytes_, OutOfMemory,
                   "host memory for saved tensors: asked for " + human_bytes(bytes) + " with " +
                       human_bytes(lent_bytes_) + " of " + human_bytes(limit_) + " in use");
      gone = make_room(bytes);
    }
    for (const auto& each : gone) {
      going += each->bytes();
    }
    going_bytes_ += going;
    lent_bytes_ += bytes;
    most_lent_ = std::max(most_lent_, lent_bytes_);
  }
  gone.clear();
  {
    const std::lock_guard lock(mutex_);
    going_bytes_ -= going;
    peak_bytes_ = std::max(peak_bytes_, kept_bytes_ + lent_bytes_ + going_bytes_);
  }
  if (!region) {
    try {
      region = std::make_unique<ArenaRegion>(arena_, bytes);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      lent_bytes_ -= bytes;
      throw;
    }
  }
  ArenaRegion* const lent = region.release();
  return {lent,
          [pool = shared_from_this()](ArenaRegion* back) { pool->give_back(std::unique_ptr<ArenaRegion>(back)); }};
}

void HostBuffers::give_back(std::unique_ptr<ArenaRegion> region) noexcept {
  const std::lock_guard lock(mutex_);
  const Bytes bytes = region->bytes();
  lent_bytes_ -= bytes;
  if (!closed_) {
    kept_bytes_ += bytes;
    kept_.emplace(bytes, std::move(region));
  }
}

std::vector<std::unique_ptr<ArenaRegion>> HostBuffers::make_room(Bytes bytes) {
  std::vector<std::unique_ptr<ArenaRegion>> gone;
  const Bytes most = std::min(most_lent_, limit_ - going_bytes_);
  while (!kept_.empty() && kept_bytes_ + lent_bytes_ + bytes > most) {
    const auto largest = std::prev(kept_.end());
    kept_bytes_ -= largest->first;
    gone.push_back(std::move(largest->second));
    kept_.erase(largest);
  }
  return gone;
}

void HostBuffers::close() noexcept {
  std::multimap<Bytes, std::unique_ptr<ArenaRegion>> gone;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  kept_bytes_ = 0;
  gone.swap(kept_);
}

Bytes HostBuffers::lent_bytes() const {
  const std::lock_guard lock(mutex_);
  return lent_bytes_;
}

Bytes HostBuffers::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_bytes_;
}

Bytes HostBuffers::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

}  // namespace hydra
