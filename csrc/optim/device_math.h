// The arithmetic of optimizer steps in a device's own memory: what StepPlan and norm.h do on the host, to the same bits
// (but for the payload of a NaN). Backends whose memory the host cannot compute on bring it.
#pragma once

#include <span>

#include "csrc/optim/norm.h"
#include "csrc/optim/step_plan.h"

namespace hydra {

class DeviceMath {
 public:
  virtual ~DeviceMath() = default;
  /// Every parameter of the plan, behind what the calling thread has enqueued; returns when it is enqueued.
  virtual void run(const StepPlan& plan, float scale) = 0;
  /// As the function of this name; blocks until the sums are there.
  virtual void sums_of_squares(std::span<const NormInput> inputs, std::span<double> sums) = 0;
};

}  // namespace hydra
