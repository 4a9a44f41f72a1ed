#include "csrc/pytorch/cuda/cuda_backend.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "csrc/base/errors.h"
#include "csrc/optim/cuda_step.h"
#include "csrc/pytorch/cuda/cuda_budget.h"
#include "csrc/pytorch/cuda/cuda_relief.h"
#include "csrc/pytorch/cuda/expandable_segments.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

cudaStream_t current_stream_of(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

using Scratch = std::unique_ptr<void, void (*)(void*)>;

/// Memory of the stream. No room is made for it: the caller may hold a lock that this needs. Throws OutOfMemory.
Scratch scratch(Bytes bytes, cudaStream_t stream) {
  const CudaReliefPause pause;
  try {
    return {allocator::raw_alloc_with_stream(static_cast<std::size_t>(bytes), stream),
            [](void* memory) { allocator::raw_delete(memory); }};
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory(human_bytes(bytes) + " for sums of squares were refused: " + error.what_without_backtrace());
  }
}

struct Service {
  Service(MemoryClient client, CudaSlots& slots)
      : segments(client.budget), budget(slots.device(), client.budget), relief(std::move(client), slots) {}
  ExpandableSegments segments;  // before the budget, which depends on it
  CudaBudget budget;
  CudaRelief relief;
};

}  // namespace

CudaBackend::CudaBackend(int device, cudaStream_t home, std::unique_ptr<CudaSlots> slots)
    : CudaDevice(
          device, home, [device] { return current_stream_of(device); }, std::move(slots)),
      cuda_slots_(static_cast<CudaSlots&>(this->slots())) {}

std::shared_ptr<CudaBackend> CudaBackend::make(int device) {
  const CudaDeviceGuard guard(device);
  const cudaStream_t home = current_stream_of(device);
  auto slots = std::make_unique<CudaSlots>(device, home);
  return std::shared_ptr<CudaBackend>(
      std::unique_ptr<CudaBackend>(new CudaBackend(device, home, std::move(slots))));  // the constructor is private
}

std::shared_ptr<void> CudaBackend::serve(MemoryClient client) {
  return std::make_shared<Service>(std::move(client), cuda_slots_);
}

DeviceMeter CudaBackend::meter(Bytes budget) {
  constexpr Bytes kSlackDivisor = 25;  // 4 %; what torch's allocator cannot use beyond it, the meter counts
  const auto describe = [this] {
    const CudaMemory now = memory();
    return "weights " + human_bytes(now.slots) + ", other tensors " + human_bytes(now.allocated - now.slots) +
           ", and unused memory between them of " + human_bytes(now.reserved - now.allocated);
  };
  return {[this] { return cuda_slots_.take_activation_peak(); }, describe, budget / kSlackDivisor};
}

void CudaBackend::run(const StepPlan& plan, float scale) {
  const CudaDeviceGuard guard(device());
  const cudaStream_t stream = current_stream_of(device());
  for (const ParameterUpdate& update : plan.updates()) {
    HYDRA_CUDA(launch_update(update, scale, stream));
  }
}

void CudaBackend::sums_of_squares(std::span<const NormInput> inputs, std::span<double> sums) {
  const CudaDeviceGuard guard(device());
  const cudaStream_t stream = current_stream_of(device());
  std::size_t chunks = 0;
  for (const NormInput& input : inputs) {
    chunks += static_cast<std::size_t>(norm_chunks(input));
  }
  std::vector<double> parts(chunks);
  if (chunks > 0) {
    const Scratch memory = scratch(static_cast<Bytes>(chunks * sizeof(double)), stream);
    auto* next = static_cast<double*>(memory.get());
    for (const NormInput& input : inputs) {
      HYDRA_CUDA(launch_chunk_sums(input, next, stream));
      next += norm_chunks(input);
    }
    HYDRA_CUDA(cudaMemcpyAsync(parts.data(), memory.get(), chunks * sizeof(double), cudaMemcpyDeviceToHost, stream));
    HYDRA_CUDA(cudaStreamSynchronize(stream));
  }
  const double* part = parts.data();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    sums[i] = 0.0;
    for (std::int64_t chunk = 0; chunk < norm_chunks(inputs[i]); ++chunk) {
      sums[i] += *part++;
    }
  }
}

CudaMemory CudaBackend::memory() const {
  const CudaDeviceGuard guard(device());
  std::size_t free = 0;
  std::size_t total = 0;
  HYDRA_CUDA(cudaMemGetInfo(&free, &total));
  const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device()));
  CudaMemory memory;
  memory.total = static_cast<Bytes>(total);
  memory.allocated = stats.allocated_bytes[kAll].current;
  memory.reserved = stats.reserved_bytes[kAll].current;
  memory.reserved_peak = std::max(cuda_slots_.reserved_peak(), memory.reserved);
  memory.slots = cuda_slots_.live_bytes();
  memory.outside = memory.total - static_cast<Bytes>(free) - memory.reserved;
  return memory;
}

}  // namespace hydra
