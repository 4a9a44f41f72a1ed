// Scripted faults of a simulated device. Its lanes, its slots and its compute lane call them before they act.
//
// Called on the lane's thread, on the thread that allocates, or on the compute lane's thread. Thread-safe.
#pragma once

#include <cstdint>

#include "csrc/base/types.h"

namespace hydra {

enum class Direction : std::uint8_t { kToDevice, kToHost };

class FaultInjector {
 public:
  virtual ~FaultInjector() = default;
  /// Called before a job's first byte. May sleep; may throw an error for the job's ticket.
  virtual void before_job(Direction direction) = 0;
  /// Called before a slot is allocated. May throw OutOfMemory.
  virtual void before_slot(Bytes bytes) = 0;
  /// Called before a kernel of the asynchronous mode ends. May block, which delays all later kernels.
  virtual void before_kernel() noexcept {}
};

}  // namespace hydra
