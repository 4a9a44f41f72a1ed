// Page-locks the host arena's regions for CUDA: one registration for each region, valid for every device.
//
// A region is pinned at its exact size; torch's pinned allocator would round up to a power of two.
// A forked child never un-pins its parent's regions. If the driver refuses, pin() returns false and the region stays
// pageable. Owns no memory. Thread-safe. Sizes are bytes.
#pragma once

#include "csrc/memory/host_arena.h"

namespace hydra {

class CudaPinner final : public Pinner {
 public:
  /// Makes and ends registrations in the context of `device`, so that CUDA initialises no other device.
  explicit CudaPinner(int device) noexcept;

  bool pin(void* pointer, Bytes bytes) noexcept override;
  void unpin(void* pointer, Bytes bytes) noexcept override;

 private:
  const int device_;
  const std::int64_t owner_process_;
};

}  // namespace hydra
