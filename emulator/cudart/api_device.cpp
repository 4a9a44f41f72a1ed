// CUDA's calls about devices: which there are, which is current, what they can do.
#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "emulator/cudart/call.h"

namespace {

using namespace emulated_cuda;
using namespace emulated_cuda::cudart;

constexpr int kVersion = 13000;

constexpr std::size_t operator""_KiB(unsigned long long count) { return static_cast<std::size_t>(count) << 10U; }

std::string pci_bus_id(int device) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "0000:%02X:00.0", static_cast<unsigned>(device + 1));
  return text.data();
}

template <std::size_t N>
void set_text(char (&target)[N], std::string_view text) {
  std::copy_n(text.begin(), std::min(text.size(), N - 1), target);
}

/// A card of compute capability 9.0, with the emulated memory.
cudaDeviceProp properties(Device& device) {
  cudaDeviceProp card{};
  set_text(card.name, "Emulated H100");
  set_text(card.uuid.bytes, "emulated card " + std::to_string(device.number));
  card.totalGlobalMem = device.memory.capacity();
  card.sharedMemPerBlock = 48_KiB;
  card.sharedMemPerBlockOptin = 227_KiB;
  card.sharedMemPerMultiprocessor = 228_KiB;
  card.reservedSharedMemPerBlock = 1_KiB;
  card.regsPerBlock = 65536;
  card.regsPerMultiprocessor = 65536;
  card.warpSize = 32;
  card.memPitch = 2147483647;
  card.maxThreadsPerBlock = 1024;
  card.maxThreadsPerMultiProcessor = 2048;
  card.maxBlocksPerMultiProcessor = 32;
  std::ranges::copy(std::array{1024, 1024, 64}, card.maxThreadsDim);
  std::ranges::copy(std::array{2147483647, 65535, 65535}, card.maxGridSize);
  card.totalConstMem = 64_KiB;
  card.major = 9;
  card.minor = 0;
  card.textureAlignment = 512;
  card.texturePitchAlignment = 32;
  card.surfaceAlignment = 512;
  card.multiProcessorCount = 132;
  card.canMapHostMemory = 1;
  card.concurrentKernels = 1;
  card.ECCEnabled = 1;
  card.pciBusID = device.number + 1;
  card.asyncEngineCount = 3;
  card.unifiedAddressing = 1;
  card.memoryBusWidth = 5120;
  card.l2CacheSize = static_cast<int>(51200_KiB);
  card.streamPrioritiesSupported = 1;
  card.memoryPoolsSupported = 1;
  card.globalL1CacheSupported = 1;
  card.localL1CacheSupported = 1;
  card.computePreemptionSupported = 1;
  card.canUseHostPointerForRegisteredMem = 1;
  card.cooperativeLaunch = 1;
  card.hostRegisterSupported = 1;
  card.clusterLaunch = 1;
  card.unifiedFunctionPointers = 1;
  return card;
}

/// Where a device's property says what an attribute asks.
constexpr std::array<std::pair<cudaDeviceAttr, int cudaDeviceProp::*>, 22> kAttributes{{
    {cudaDevAttrMaxThreadsPerBlock, &cudaDeviceProp::maxThreadsPerBlock},
    {cudaDevAttrMaxThreadsPerMultiProcessor, &cudaDeviceProp::maxThreadsPerMultiProcessor},
    {cudaDevAttrMaxBlocksPerMultiprocessor, &cudaDeviceProp::maxBlocksPerMultiProcessor},
    {cudaDevAttrWarpSize, &cudaDeviceProp::warpSize},
    {cudaDevAttrMaxRegistersPerBlock, &cudaDeviceProp::regsPerBlock},
    {cudaDevAttrMaxRegistersPerMultiprocessor, &cudaDeviceProp::regsPerMultiprocessor},
    {cudaDevAttrMultiProcessorCount, &cudaDeviceProp::multiProcessorCount},
    {cudaDevAttrComputeCapabilityMajor, &cudaDeviceProp::major},
    {cudaDevAttrComputeCapabilityMinor, &cudaDeviceProp::minor},
    {cudaDevAttrL2CacheSize, &cudaDeviceProp::l2CacheSize},
    {cudaDevAttrGlobalMemoryBusWidth, &cudaDeviceProp::memoryBusWidth},
    {cudaDevAttrAsyncEngineCount, &cudaDeviceProp::asyncEngineCount},
    {cudaDevAttrConcurrentKernels, &cudaDeviceProp::concurrentKernels},
    {cudaDevAttrPciBusId, &cudaDeviceProp::pciBusID},
    {cudaDevAttrPciDeviceId, &cudaDeviceProp::pciDeviceID},
    {cudaDevAttrPciDomainId, &cudaDeviceProp::pciDomainID},
    {cudaDevAttrCanMapHostMemory, &cudaDeviceProp::canMapHostMemory},
    {cudaDevAttrUnifiedAddressing, &cudaDeviceProp::unifiedAddressing},
    {cudaDevAttrHostRegisterSupported, &cudaDeviceProp::hostRegisterSupported},
    {cudaDevAttrCanUseHostPointerForRegisteredMem, &cudaDeviceProp::canUseHostPointerForRegisteredMem},
    {cudaDevAttrCooperativeLaunch, &cudaDeviceProp::cooperativeLaunch},
    {cudaDevAttrMemoryPoolsSupported, &cudaDeviceProp::memoryPoolsSupported},
}};

/// Attributes whose properties are sizes.
cudaError_t size_attribute(const cudaDeviceProp& card, cudaDeviceAttr attribute, int* value) {
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(card.sharedMemPerBlock);
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(card.sharedMemPerBlockOptin);
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(card.sharedMemPerMultiprocessor);
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Work>
cudaError_t with_device(const char* name, int device, Work work) {
  return call(name, kUsesThread, [&] {
    return Machine::get().has_device(device) ? work(Machine::get().device(device)) : cudaErrorInvalidDevice;
  });
}

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  return call("cudaGetDevice", kUsesThread, [&] {
    *device = this_thread().device;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaSetDevice(int device) {
  return with_device("cudaSetDevice", device, [](Device& chosen) {
    this_thread().device = chosen.number;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", kUsesThread, [&] {
    *count = Machine::get().devices();
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* card, int device) {
  return with_device("cudaGetDeviceProperties", device, [&](Device& chosen) {
    *card = properties(chosen);
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return with_device("cudaDeviceGetAttribute", device, [&](Device& chosen) {
    const cudaDeviceProp card = properties(chosen);
    const auto* const found =
        std::ranges::find(kAttributes, attribute, &std::pair<cudaDeviceAttr, int cudaDeviceProp::*>::first);
    if (found == kAttributes.end()) {
      return size_attribute(card, attribute, value);
    }
    *value = card.*found->second;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  return with_device("cudaDeviceGetPCIBusId", device, [&](Device& chosen) {
    const std::string id = pci_bus_id(chosen.number);
    if (text == nullptr || bytes <= static_cast<int>(id.size())) {
      return cudaErrorInvalidValue;
    }
    *std::copy(id.begin(), id.end(), text) = '\0';
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  return call("cudaDeviceSynchronize", kWaits | kFailsLate, [] {
    Device& device = Machine::get().current();
    Machine::get().wait_for(device);
    return device.fault.load();
  });
}

cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call("cudaDeviceGetStreamPriorityRange", kUsesThread, [&] {
    *least = kLeastPriority;
    *greatest = kGreatestPriority;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return with_device("cudaDeviceCanAccessPeer", device, [&](Device&) {
    *can = device != peer ? 1 : 0;
    return Machine::get().has_device(peer) ? cudaSuccess : cudaErrorInvalidDevice;
  });
}

cudaError_t CUDARTAPI cudaRuntimeGetVersion(int* version) {
  return call("cudaRuntimeGetVersion", kUsesThread, [&] {
    *version = kVersion;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
  return call("cudaDriverGetVersion", kUsesThread, [&] {
    *version = kVersion;
    return cudaSuccess;
  });
}

}  // extern "C"
