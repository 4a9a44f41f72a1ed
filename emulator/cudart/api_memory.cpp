// CUDA's calls about memory of devices, and about page-locked memory of the host.
#include "emulator/cudart/call.h"

namespace {

using namespace emulated_cuda;
using namespace emulated_cuda::cudart;

constexpr unsigned kAllocFlags = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
constexpr unsigned kRegisterFlags = cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterReadOnly;

/// Makes every device fail that still copies from or to a region, which is pinned no more; the copies are dropped. The
/// result is the error of these devices.
cudaError_t end_copies(PinnedMemory::Region& region) {
  cudaError_t error = cudaSuccess;
  for (const int device : region.devices_in_flight()) {
    Machine::get().set_fault(device, cudaErrorIllegalAddress);
    error = cudaErrorIllegalAddress;
  }
  region.wait_until_unused();  // a copy that already runs ends soon: the caller may free the memory
  return error;
}

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call("cudaMemGetInfo", kUsesDevice, [&] {
    const DeviceMemory& memory = Machine::get().current().memory;
    *total = memory.capacity();
    *free = *total - memory.used();
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaMalloc(void** pointer, std::size_t bytes) {
  return call("cudaMalloc", kUnsafeInCapture, [&] {
    if (bytes == 0) {
      *pointer = nullptr;
      return cudaSuccess;
    }
    return Machine::get().current().memory.allocate(pointer, bytes);
  });
}

cudaError_t CUDARTAPI cudaFree(void* pointer) {
  return call("cudaFree", kWaits | kGivesBack, [&] {
    if (pointer == nullptr) {
      return cudaSuccess;
    }
    const int device = device_of(pointer);
    if (device < 0 || !Machine::get().device(device).memory.is_allocation(pointer)) {
      return cudaErrorInvalidValue;
    }
    return Machine::get().give_back(device, [pointer](DeviceMemory& memory) {
      memory.release(pointer);
      return cudaSuccess;
    });
  });
}

cudaError_t CUDARTAPI cudaHostRegister(void* pointer, std::size_t bytes, unsigned flags) {
  return call("cudaHostRegister", kUsesDevice, [&] {
    if ((flags & ~kRegisterFlags) != 0) {
      return cudaErrorInvalidValue;
    }
    const cudaError_t error = Machine::get().pinned.register_memory(pointer, bytes, this_thread().device);
    Machine::get().registrations += error == cudaSuccess ? 1 : 0;
    return error;
  });
}

cudaError_t CUDARTAPI cudaHostUnregister(void* pointer) {
  return call("cudaHostUnregister", kWaits | kGivesBack, [&] {
    const auto region = Machine::get().pinned.remove(pointer, PinnedMemory::Kind::kRegistered);
    if (!region) {
      return cudaErrorHostMemoryNotRegistered;
    }
    --Machine::get().registrations;
    const cudaError_t error = end_copies(*region);
    // Its pages leave the addresses of all devices, for which the driver waits until they are idle.
    for (int device = 0; device < Machine::get().devices(); ++device) {
      Machine::get().wait_for(Machine::get().device(device));
    }
    return error;
  });
}

cudaError_t CUDARTAPI cudaHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
  return call("cudaHostAlloc", kUsesDevice, [&] {
    if ((flags & ~kAllocFlags) != 0) {
      return cudaErrorInvalidValue;
    }
    if (bytes == 0) {
      *pointer = nullptr;
      return cudaSuccess;
    }
    return Machine::get().pinned.allocate(pointer, bytes, this_thread().device);
  });
}

cudaError_t CUDARTAPI cudaFreeHost(void* pointer) {
  return call("cudaFreeHost", kWaits | kGivesBack, [&] {
    if (pointer == nullptr) {
      return cudaSuccess;
    }
    const auto region = Machine::get().pinned.remove(pointer, PinnedMemory::Kind::kAllocated);
    if (!region) {
      return cudaErrorInvalidValue;
    }
    const cudaError_t error = end_copies(*region);
    PinnedMemory::free(pointer);
    return error;
  });
}

cudaError_t CUDARTAPI cudaHostGetDevicePointer(void** device_pointer, void* pointer, unsigned flags) {
  return call("cudaHostGetDevicePointer", kUsesDevice, [&] {
    if (flags != 0 || !Machine::get().pinned.find(pointer, 1)) {
      return cudaErrorInvalidValue;
    }
    *device_pointer = pointer;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return call("cudaPointerGetAttributes", kUsesDevice, [&] {
    *attributes = {};
    void* const place = const_cast<void*>(pointer);
    const int device = device_of(pointer);
    if (device >= 0 && Machine::get().device(device).memory.holds(pointer, 1)) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = device;
      attributes->devicePointer = place;
    } else if (const auto region = Machine::get().pinned.find(pointer, 1)) {
      attributes->type = cudaMemoryTypeHost;
      attributes->device = region->device;
      attributes->devicePointer = place;
      attributes->hostPointer = place;
    } else {
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = cudaInvalidDeviceId;
      attributes->hostPointer = place;
    }
    return cudaSuccess;
  });
}

}  // extern "C"
