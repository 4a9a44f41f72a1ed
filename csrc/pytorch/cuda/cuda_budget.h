// The budget on CUDA: the bytes that torch's allocator may reserve on a device while this object lives.
//
// torch enforces it by the memory fraction, which limits all memory that this process holds there through torch. With
// expandable segments it may pass the fraction by less than a page, so the fraction is a page smaller.
// The budgets of several runs on one device add up. A limit that the user has set is never raised, and is restored when
// the last run ends. The CUDA context, library handles and other processes do not count. Thread-safe.
#pragma once

#include "csrc/base/types.h"

namespace hydra {

class CudaBudget {
 public:
  CudaBudget(int device, Bytes bytes);
  ~CudaBudget();
  CudaBudget(const CudaBudget&) = delete;
  CudaBudget& operator=(const CudaBudget&) = delete;

  /// The sum of the budgets on a device now.
  static Bytes sum(int device);

 private:
  const int device_;
  const Bytes bytes_;
};

}  // namespace hydra
