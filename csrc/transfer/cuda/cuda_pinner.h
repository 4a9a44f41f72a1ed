// Page-locks the host arena's regions for CUDA: one registration per region, valid for every device.
//
// A region is pinned at its exact size, unlike torch's pinned allocator, which rounds up to a power of two.
// A forked child never un-pins what its parent pinned. When the driver refuses, the region stays pageable.
#pragma once

#include "csrc/memory/host_arena.h"

namespace hydra {

class CudaPinner final : public Pinner {
 public:
  /// `device`: in whose context the registration is made, so that no other device is woken up.
  explicit CudaPinner(int device) noexcept;

  bool pin(void* pointer, Bytes bytes) noexcept override;
  void unpin(void* pointer, Bytes bytes) noexcept override;

 private:
  const int device_;
  const std::int64_t owner_process_;
};

}  // namespace hydra
