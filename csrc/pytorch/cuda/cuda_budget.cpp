#include "csrc/pytorch/cuda/cuda_budget.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "csrc/pytorch/cuda/expandable_segments.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

struct Limit {
  double before = 1.0;  // the user's memory fraction
  Bytes budgets = 0;
  int runs = 0;
};

struct Limits {
  std::mutex mutex;
  std::map<int, Limit> by_device;
};

Limits& limits() {
  static auto* const instance = std::make_unique<Limits>().release();
  return *instance;
}

void apply(int device, const Limit& limit) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  const CudaDeviceGuard guard(device);  // torch makes the device current, and leaves it so
  if (limit.runs == 0) {
    allocator::setMemoryFraction(limit.before, index);
    return;
  }
  std::size_t free = 0;
  std::size_t total = 0;
  HYDRA_CUDA(cudaMemGetInfo(&free, &total));
  const Bytes bytes = limit.budgets - ExpandableSegments::excess(limit.budgets);
  const double fraction = static_cast<double>(bytes) / static_cast<double>(total);
  allocator::setMemoryFraction(std::min(limit.before, fraction), index);
}

}  // namespace

CudaBudget::CudaBudget(int device, Bytes bytes) : device_(device), bytes_(bytes) {
  Limits& known = limits();
  const std::lock_guard lock(known.mutex);
  Limit limit = known.by_device[device];
  if (limit.runs == 0) {
    const CudaDeviceGuard guard(device);  // as in apply()
    limit.before = allocator::getMemoryFraction(static_cast<c10::DeviceIndex>(device));
  }
  limit.budgets += bytes;
  ++limit.runs;
  apply(device, limit);
  known.by_device[device] = limit;
}

Bytes CudaBudget::sum(int device) {
  Limits& known = limits();
  const std::lock_guard lock(known.mutex);
  return known.by_device[device].budgets;
}

CudaBudget::~CudaBudget() {
  Limits& known = limits();
  const std::lock_guard lock(known.mutex);
  Limit& limit = known.by_device[device_];
  limit.budgets -= bytes_;
  --limit.runs;
  try {
    apply(device_, limit);
  } catch (const std::exception&) {
    // The device has failed, or the allocator was destroyed first: the limit no longer matters.
    forget_cuda_error(cudaErrorUnknown);
  }
}

}  // namespace hydra
