// The CUDA device with torch on top: slots from torch's allocator, torch's current streams, torch's budget.
#pragma once

#include <memory>

#include "csrc/optim/device_math.h"
#include "csrc/pytorch/memory/cuda_slots.h"
#include "csrc/transfer/cuda/cuda_device.h"

namespace hydra {

/// What the device holds now, in bytes.
struct CudaMemory {
  Bytes total = 0;
  Bytes allocated = 0;      // by tensors and slots, through torch
  Bytes reserved = 0;       // by torch's allocator: what the budget bounds
  Bytes reserved_peak = 0;  // since the backend was made
  Bytes slots = 0;
  Bytes outside = 0;  // contexts, library handles, other processes: what no budget here bounds
};

class CudaBackend final : public CudaDevice, public DeviceMath {
 public:
  /// The calling thread's current stream on `device` becomes the home stream.
  static std::shared_ptr<CudaBackend> make(int device);

  std::shared_ptr<void> serve(MemoryClient client) override;
  std::function<Bytes()> activation_meter() override;
  bool crowded(Bytes budget) const override;
  CudaMemory memory() const;
  /// On the calling thread's current stream.
  void run(const StepPlan& plan, float scale) override;
  void sums_of_squares(std::span<const NormInput> inputs, std::span<double> sums) override;

 private:
  CudaBackend(int device, cudaStream_t home, std::unique_ptr<CudaSlots> slots);

  CudaSlots& cuda_slots_;  // owned by the base
};

}  // namespace hydra
