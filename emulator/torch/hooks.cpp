// The emulated device in torch's registries: the guard of streams and devices, and the hooks that torch's CPU half
// calls for CUDA. torch asks for the hooks once, so the library is loaded before torch.

#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/impl/CUDAGuardImpl.h>

#include <string>

#include "emulator/torch/pinned_memory.h"
#include "emulator/torch/random.h"

namespace c10::cuda::impl {
C10_REGISTER_GUARD_IMPL(CUDA, CUDAGuardImpl)
}  // namespace c10::cuda::impl

namespace at {

namespace {

struct EmulatedHooks final : CUDAHooksInterface {
  explicit EmulatedHooks(CUDAHooksArgs) {}

  void init() const override { c10::cuda::CUDACachingAllocator::init(c10::cuda::device_count_ensure_non_zero()); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return deviceCount() > 0; }
  bool hasCUDA() const override { return isAvailable(); }
  bool hasCUDART() const override { return true; }
  long versionCUDART() const override { return CUDART_VERSION; }
  std::string showConfig() const override { return "  - an emulated CUDA machine\n"; }

  DeviceIndex deviceCount() const override { return c10::cuda::device_count(); }
  int getNumGPUs() const override { return deviceCount(); }
  DeviceIndex current_device() const override { return isAvailable() ? c10::cuda::current_device() : DeviceIndex{-1}; }
  DeviceIndex getCurrentDevice() const override { return c10::cuda::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { c10::cuda::set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return c10::cuda::ExchangeDevice(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return c10::cuda::MaybeExchangeDevice(device); }
  bool hasPrimaryContext(DeviceIndex device) const override { return c10::cuda::hasPrimaryContext(device); }
  void deviceSynchronize(DeviceIndex device) const override {
    const c10::cuda::CUDAGuard guard(device);
    c10::cuda::device_synchronize();
  }

  bool isPinnedPtr(const void* data) const override { return emulated_cuda::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &emulated_cuda::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return c10::cuda::CUDACachingAllocator::get(); }
  Device getDeviceFromPtr(void* data) const override {
    cudaPointerAttributes attributes{};
    C10_CUDA_CHECK(cudaPointerGetAttributes(&attributes, data));
    TORCH_CHECK(attributes.type == cudaMemoryTypeDevice,
                "The specified pointer resides on host memory and is not "
                "registered with any CUDA device.");
    return {c10::kCUDA, static_cast<DeviceIndex>(attributes.device)};
  }

  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return emulated_cuda::default_device_generator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override { return emulated_cuda::make_device_generator(device); }
};

}  // namespace

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedHooks)

}  // namespace at
