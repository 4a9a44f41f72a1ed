// The budget on CUDA: the bytes that torch's allocator may reserve on a device, as long as a run lasts.
//
// torch enforces it (the memory fraction), against everything that this process holds there through torch.
// The budgets of several runs on one device add up; a limit that the user set is never raised, and is back when
// the last run ends. The CUDA context, library handles, and other processes do not count.
#pragma once

#include "csrc/base/types.h"

namespace hydra {

class CudaBudget {
 public:
  CudaBudget(int device, Bytes bytes);
  ~CudaBudget();
  CudaBudget(const CudaBudget&) = delete;
  CudaBudget& operator=(const CudaBudget&) = delete;

 private:
  const int device_;
  const Bytes bytes_;
};

}  // namespace hydra
