// The CUDA device on top of torch: slots from torch's allocator, torch's current streams, and torch's memory limit.
//
// Owns its lanes and slots. Thread-safe; no call needs or takes the interpreter lock. Sizes are bytes.
#pragma once

#include <memory>

#include "csrc/optim/device_math.h"
#include "csrc/pytorch/cuda/cuda_slots.h"
#include "csrc/transfer/cuda/cuda_device.h"

namespace hydra {

/// The device's memory now, in bytes.
struct CudaMemory {
  Bytes total = 0;
  Bytes allocated = 0;      // by tensors and slots, through torch
  Bytes reserved = 0;       // by torch's allocator; the budget limits this
  Bytes reserved_peak = 0;  // while a run was served
  Bytes slots = 0;
  Bytes outside = 0;  // contexts, library handles, other processes; no budget limits this
};

class CudaBackend final : public CudaDevice, public DeviceMath {
 public:
  /// The calling thread's current stream on `device` becomes the main stream.
  static std::shared_ptr<CudaBackend> make(int device);

  std::shared_ptr<void> serve(MemoryClient client) override;
  DeviceMeter meter(Bytes budget) override;
  CudaMemory memory() const;
  /// Runs on the calling thread's current stream.
  void run(const StepPlan& plan, float scale) override;
  void sums_of_squares(std::span<const NormInput> inputs, std::span<double> sums) override;

 private:
  CudaBackend(int device, cudaStream_t home, std::unique_ptr<CudaSlots> slots);

  CudaSlots& cuda_slots_;  // the base class owns them
};

}  // namespace hydra
