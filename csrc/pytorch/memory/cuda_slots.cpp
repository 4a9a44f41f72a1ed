#include "csrc/pytorch/memory/cuda_slots.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "csrc/base/errors.h"
#include "csrc/pytorch/memory/cuda_relief.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr Bytes kAllocatorPage = 2 * kMiB;
constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// The size of a slot's allocation.
Bytes rounded(Bytes bytes) noexcept { return bytes < kMiB ? bytes : round_up(bytes, kAllocatorPage); }

void raise_to(std::atomic<Bytes>& peak, Bytes value) noexcept {
  Bytes seen = peak.load(std::memory_order_relaxed);
  while (value > seen && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void* CudaSlots::allocate(Bytes bytes) {
  HYDRA_EXPECT(bytes > 0, StateError, "cannot allocate " + std::to_string(bytes) + " bytes: ask for at least one");
  const Bytes size = rounded(bytes);
  observe();
  void* pointer = nullptr;
  try {
    const CudaDeviceGuard guard(device_);
    const CudaReliefPause pause;
    pointer = allocator::raw_alloc_with_stream(static_cast<std::size_t>(size), home_);
  } catch (const c10::OutOfMemoryError&) {
    const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device_));
    throw OutOfMemory("a slot of " + human_bytes(size) + " on cuda:" + std::to_string(device_) +
                      " was refused: " + human_bytes(stats.allocated_bytes[kAll].current) + " are allocated and " +
                      human_bytes(stats.reserved_bytes[kAll].current) +
                      " reserved by this process; raise the budget, or free other tensors on this device");
  } catch (const c10::Error& error) {
    throw TransferError("a slot of " + human_bytes(size) + " on cuda:" + std::to_string(device_) +
                        " was refused: " + error.what_without_backtrace());
  }
  live_ += size;
  return pointer;
}

void CudaSlots::release(void* pointer, Bytes bytes) noexcept {
  observe();
  live_ -= rounded(bytes);
  try {
    allocator::raw_delete(pointer);
  } catch (const std::exception&) {
    // Happens only at exit, if the allocator was destroyed first. The memory ends with the process.
    forget_cuda_error(cudaErrorUnknown);
  }
}

/// Notes the peaks since the last call. Returns the bytes allocated now, without the slots.
Bytes CudaSlots::observe() noexcept {
  try {
    const auto index = static_cast<c10::DeviceIndex>(device_);
    const auto stats = allocator::getDeviceStats(index);
    allocator::resetPeakStats(index);
    const Bytes live = live_;
    raise_to(activation_peak_, stats.allocated_bytes[kAll].peak - live);
    raise_to(reserved_peak_, stats.reserved_bytes[kAll].peak);
    return stats.allocated_bytes[kAll].current - live;
  } catch (const std::exception&) {
    return 0;  // the allocator was destroyed first
  }
}

Bytes CudaSlots::take_activation_peak() {
  const Bytes now = observe();
  return activation_peak_.exchange(now);
}

}  // namespace hydra
