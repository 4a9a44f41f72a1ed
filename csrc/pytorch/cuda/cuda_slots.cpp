#include "csrc/pytorch/cuda/cuda_slots.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "csrc/base/errors.h"
#include "csrc/pytorch/cuda/cuda_relief.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr Bytes kUnit = 512;
constexpr Bytes kPage = 2 * kMiB;
constexpr Bytes kOwnMemory = 10 * kMiB;  // from here on each allocation has memory of its own
constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

void raise_to(std::atomic<Bytes>& peak, Bytes value) noexcept {
  Bytes seen = peak.load(std::memory_order_relaxed);
  while (value > seen && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

Bytes CudaSlots::rounded(Bytes bytes) noexcept { return round_up(bytes, bytes < kOwnMemory ? kUnit : kPage); }

void* CudaSlots::allocate(Bytes bytes) {
  HYDRA_EXPECT(bytes > 0, StateError, "cannot allocate " + std::to_string(bytes) + " bytes: ask for at least one");
  const Bytes size = rounded(bytes);
  const CudaDeviceGuard guard(device_);
  live_ += size;  // before the meter sees the allocation
  try {
    const CudaReliefPause pause;
    return allocator::raw_alloc_with_stream(static_cast<std::size_t>(size), home_);
  } catch (const c10::OutOfMemoryError&) {
    live_ -= size;
    const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device_));
    note_refusal(stats.reserved_bytes[kAll].current, 0);
    throw OutOfMemory("a slot of " + human_bytes(size) + " on cuda:" + std::to_string(device_) +
                      " was refused: " + human_bytes(stats.allocated_bytes[kAll].current) + " are allocated and " +
                      human_bytes(stats.reserved_bytes[kAll].current) +
                      " reserved by this process; raise the budget, or free other tensors on this device");
  } catch (const c10::Error& error) {
    live_ -= size;
    throw TransferError("a slot of " + human_bytes(size) + " on cuda:" + std::to_string(device_) +
                        " was refused: " + error.what_without_backtrace());
  }
}

void CudaSlots::release(void* pointer, Bytes bytes) noexcept {
  try {
    allocator::raw_delete(pointer);
  } catch (const std::exception&) {
    // Happens only at exit, if the allocator was destroyed first. The memory ends with the process.
    forget_cuda_error(cudaErrorUnknown);
  }
  live_ -= rounded(bytes);
}

void CudaSlots::note(Bytes allocated, Bytes reserved) noexcept {
  raise_to(activation_peak_, allocated - live_);
  raise_to(reserved_peak_, reserved);
}

void CudaSlots::note_refusal(Bytes reserved, Bytes bytes) noexcept {
  raise_to(activation_peak_, reserved - live_ + bytes);
}

Bytes CudaSlots::take_activation_peak() {
  const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device_));
  const Bytes now = stats.allocated_bytes[kAll].current - live_;
  return std::max(activation_peak_.exchange(now), now);
}

}  // namespace hydra
