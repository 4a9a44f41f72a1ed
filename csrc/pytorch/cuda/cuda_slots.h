// Slots from torch's caching allocator, and a meter of the memory that the process allocates beside them.
//
// Each slot is one allocation on the main stream: the allocator reuses memory only on the stream it came from, and only
// whole allocations. Slots are rounded as the allocator rounds: to its unit, and those that get memory of their own
// from the driver, to its pages. allocate() must not be called under a lock of the engine, since torch may wait for the
// device.
//
// The meter is told of every allocation of the process on the device (cuda_relief.h), and takes the most of what is
// allocated then beside the slots. It is exact unless other threads allocate or release slots at the same moment.
// Thread-safe. Sizes are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "csrc/memory/resource.h"

namespace hydra {

class CudaSlots final : public Resource {
 public:
  CudaSlots(int device, cudaStream_t home) noexcept : device_(device), home_(home) {}

  /// The bytes that a slot takes.
  static Bytes rounded(Bytes bytes) noexcept;

  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;
  Bytes taken_by(Bytes bytes) const noexcept override { return rounded(bytes); }

  int device() const noexcept { return device_; }
  Bytes live_bytes() const noexcept { return live_.load(std::memory_order_relaxed); }

  /// Tells the meter what torch has allocated and reserved now.
  void note(Bytes allocated, Bytes reserved) noexcept;
  /// Tells the meter that torch has refused `bytes`, with `reserved` bytes that it could not release. What lies unused
  /// between allocations then counts as if it were in use, so that plans leave room for it.
  void note_refusal(Bytes reserved, Bytes bytes) noexcept;
  /// Returns the most that was allocated beside these slots since the last call.
  Bytes take_activation_peak();
  /// The most that torch has reserved.
  Bytes reserved_peak() const noexcept { return reserved_peak_.load(std::memory_order_relaxed); }

 private:
  const int device_;
  const cudaStream_t home_;
  std::atomic<Bytes> live_{0};
  std::atomic<Bytes> activation_peak_{0};
  std::atomic<Bytes> reserved_peak_{0};
};

}  // namespace hydra
