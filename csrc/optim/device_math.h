// The arithmetic of optimizer steps in a device's own memory.
//
// It gives the bits of StepPlan and norm.h on the host, except for a NaN's sign and payload. Backends provide it if
// the host cannot compute on their memory. Memory is the caller's, and has to stay until the device has run the work.
#pragma once

#include <span>

#include "csrc/optim/norm.h"
#include "csrc/optim/step_plan.h"

namespace hydra {

class DeviceMath {
 public:
  virtual ~DeviceMath() = default;
  /// Enqueues the update of every parameter in the plan, behind the work that the calling thread has enqueued.
  virtual void run(const StepPlan& plan, float scale) = 0;
  /// Does what the function of the same name does, and blocks until the sums are on the host. Throws OutOfMemory if the
  /// device has no memory for them. It asks no run to make room, so it may be called under a lock of one.
  virtual void sums_of_squares(std::span<const NormInput> inputs, std::span<double> sums) = 0;
};

}  // namespace hydra
