#include "csrc/memory/tracked_resource.h"

namespace hydra {

void* TrackedResource::allocate(Bytes bytes) {
  void* const pointer = upstream_.allocate(bytes);
  const Bytes live = live_.fetch_add(bytes) + bytes;
  Bytes peak = peak_.load();
  while (live > peak && !peak_.compare_exchange_weak(peak, live)) {
  }
  allocations_.fetch_add(1);
  return pointer;
}

void TrackedResource::release(void* pointer, Bytes bytes) noexcept {
  upstream_.release(pointer, bytes);
  live_.fetch_sub(bytes);
  releases_.fetch_add(1);
}

ResourceStatistics TrackedResource::statistics() const noexcept {
  return {.live_bytes = live_.load(),
          .peak_bytes = peak_.load(),
          .allocations = allocations_.load(),
          .releases = releases_.load()};
}

}  // namespace hydra
