#include "csrc/pytorch/memory/cuda_relief.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr const char* kName = "hydra_ext";
constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

thread_local int pauses = 0;

struct Clients {
  std::mutex mutex;
  std::vector<const CudaReliefClient*> all;
  std::atomic<std::size_t> count{0};
};

/// Never destroyed, on purpose: the allocator may call back until the process ends.
Clients& clients() {
  static auto* const instance = std::make_unique<Clients>().release();
  return *instance;
}

bool capturing() noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status);
  forget_cuda_error(result);
  return result != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

/// Evicts blocks until the headroom is free. The caller holds the clients' lock.
bool relieve_device(int device, const std::vector<const CudaReliefClient*>& all) {
  Bytes budget = 0;
  for (const CudaReliefClient* known : all) {
    budget += known->device() == device ? known->client().budget : 0;
  }
  const Bytes threshold = budget - budget / kReliefHeadroomDivisor;
  bool freed = false;
  for (const CudaReliefClient* known : all) {
    while (known->device() == device) {
      const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
      if (stats.allocated_bytes[kAll].current <= threshold || !known->client().evict_one()) {
        break;
      }
      freed = true;
    }
  }
  return freed;
}

class Relief final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    Clients& known = clients();
    if (known.count.load(std::memory_order_relaxed) == 0 || pauses > 0) {
      return false;
    }
    const CudaReliefPause pause;
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || capturing()) {
      return false;
    }
    const std::unique_lock lock(known.mutex, std::try_to_lock);
    try {
      return lock.owns_lock() && relieve_device(device, known.all);
    } catch (const std::exception&) {
      return false;  // the allocation continues without relief, and may fail with torch's own error
    }
  }
};

void register_once() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  // Registering a name twice would end the process.
  auto* registry = c10::FreeCudaMemoryCallbacksRegistry();
  if (!registry->Has(kName)) {
    registry->Register(kName, []() -> std::unique_ptr<c10::FreeMemoryCallback> { return std::make_unique<Relief>(); });
  }
}

}  // namespace

CudaReliefPause::CudaReliefPause() noexcept { ++pauses; }
CudaReliefPause::~CudaReliefPause() { --pauses; }

CudaReliefClient::CudaReliefClient(int device, MemoryClient client) : device_(device), client_(std::move(client)) {
  register_once();
  Clients& known = clients();
  const std::lock_guard lock(known.mutex);
  known.all.push_back(this);
  known.count = known.all.size();
}

CudaReliefClient::~CudaReliefClient() {
  Clients& known = clients();
  const std::lock_guard lock(known.mutex);
  std::erase(known.all, this);
  known.count = known.all.size();
}

}  // namespace hydra
