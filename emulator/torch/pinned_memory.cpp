#include "emulator/torch/pinned_memory.h"

#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace emulated_cuda {

namespace {

using c10::cuda::CUDAEvent;
using c10::cuda::CUDAStream;
using EventPointer = std::unique_ptr<CUDAEvent>;
using Block = at::HostBlock<CUDAStream>;

class PinnedBlocks final : public at::CachingHostAllocatorImpl<CUDAStream, EventPointer> {
 private:
  void allocate_host_memory(size_t size, void** pointer) override {
    C10_CUDA_CHECK(cudaHostAlloc(pointer, size, cudaHostAllocDefault));
  }
  void free_block(Block* block) override { C10_CUDA_CHECK(cudaFreeHost(block->ptr_)); }
  void record_stream(std::optional<std::vector<EventPointer>>& events, CUDAStream stream) override {
    auto event = std::make_unique<CUDAEvent>();
    event->record(stream);
    events->push_back(std::move(event));
  }
  bool query_event(EventPointer& event) override { return event->query(); }
  CUDAStream get_current_stream() const override { return c10::cuda::getCurrentCUDAStream(); }
  bool stream_is_capturing(CUDAStream stream) const override { return stream.is_capturing(); }
};

void release(void* block);

using PinnedAllocator = at::CachingHostAllocatorInterface<PinnedBlocks, &release>;

PinnedAllocator& allocator() {
  static auto* const instance = std::make_unique<PinnedAllocator>().release();
  return *instance;
}

void release(void* block) { allocator().free(block); }

const at::HostAllocatorRegistry<c10::kCUDA> registered(&allocator());

}  // namespace

at::HostAllocator& pinned_allocator() { return allocator(); }

bool is_pinned(const void* address) {
  const auto device = c10::cuda::getDeviceIndexWithPrimaryContext();
  if (!device) {
    return false;
  }
  const c10::cuda::CUDAGuard guard(*device);
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return attributes.type == cudaMemoryTypeHost;
}

}  // namespace emulated_cuda
