#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <pthread.h>
#include <torch/csrc/Generator.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <tuple>

#include "emulator/cudart/control.h"
#include "emulator/python/bindings.h"
#include "emulator/torch/random.h"

namespace emulated_cuda {

namespace {

using c10::cuda::CUDAStream;
using StreamData = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // number, device, type of device

constexpr double kCyclesASecond = 2e9;

std::atomic<bool> forked_after_use{false};

StreamData data_of(const CUDAStream& stream) {
  const auto packed = stream.pack3();
  return {packed.stream_id, packed.device_index, static_cast<std::int64_t>(packed.device_type)};
}

CUDAStream stream_of(std::int64_t number, std::int64_t device, std::int64_t type) {
  return CUDAStream::unpack3(number, static_cast<c10::DeviceIndex>(device), static_cast<c10::DeviceType>(type));
}

void initialize() {
  TORCH_CHECK(!forked_after_use, "a forked process cannot use the device");
  static const int watched = ::pthread_atfork(nullptr, nullptr, [] { forked_after_use = true; });
  static_cast<void>(watched);
  c10::cuda::device_count_ensure_non_zero();
  at::globalContext().lazyInitDevice(c10::kCUDA);
}

void set_stream(std::int64_t number, std::int64_t device, std::int64_t type) {
  const CUDAStream stream = stream_of(number, device, type);
  if (stream.device_index() != c10::cuda::current_device()) {
    c10::cuda::set_device(stream.device_index());
  }
  c10::cuda::setCurrentCUDAStream(stream);
}

void sleep_cycles(std::int64_t cycles) {
  const auto time = std::chrono::duration<double>(static_cast<double>(cycles) / kCyclesASecond);
  C10_CUDA_CHECK(launch(c10::cuda::getCurrentCUDAStream(), [time] { std::this_thread::sleep_for(time); }));
}

bool is_capturing() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

cudaDeviceProp properties_of(int device) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties;
}

float elapsed_milliseconds(std::uintptr_t start, std::uintptr_t end) {
  float milliseconds = 0;
  C10_CUDA_CHECK(
      cudaEventElapsedTime(&milliseconds, reinterpret_cast<cudaEvent_t>(start), reinterpret_cast<cudaEvent_t>(end)));
  return milliseconds;
}

bool can_access_peer(int device, int peer) {
  int possible = 0;
  C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, device, peer));
  return possible != 0;
}

pybind11::dict properties_as_dict(int device) {
  const cudaDeviceProp properties = properties_of(device);
  pybind11::dict dict;
  dict["name"] = std::string(properties.name);
  dict["major"] = properties.major;
  dict["minor"] = properties.minor;
  dict["total_memory"] = properties.totalGlobalMem;
  dict["multi_processor_count"] = properties.multiProcessorCount;
  dict["max_threads_per_multi_processor"] = properties.maxThreadsPerMultiProcessor;
  dict["max_threads_per_block"] = properties.maxThreadsPerBlock;
  dict["shared_memory_per_block"] = properties.sharedMemPerBlock;
  dict["shared_memory_per_block_optin"] = properties.sharedMemPerBlockOptin;
  dict["shared_memory_per_multiprocessor"] = properties.sharedMemPerMultiprocessor;
  dict["regs_per_multiprocessor"] = properties.regsPerMultiprocessor;
  dict["warp_size"] = properties.warpSize;
  dict["L2_cache_size"] = properties.l2CacheSize;
  dict["is_integrated"] = properties.integrated;
  dict["is_multi_gpu_board"] = properties.isMultiGpuBoard;
  dict["pci_bus_id"] = properties.pciBusID;
  dict["pci_device_id"] = properties.pciDeviceID;
  dict["pci_domain_id"] = properties.pciDomainID;
  return dict;
}

void bind_streams(pybind11::module_& module) {
  add(module, "current_stream",
      [](c10::DeviceIndex device) { return data_of(c10::cuda::getCurrentCUDAStream(device)); });
  add(module, "default_stream",
      [](c10::DeviceIndex device) { return data_of(c10::cuda::getDefaultCUDAStream(device)); });
  add(module, "external_stream", [](std::uintptr_t handle, c10::DeviceIndex device) {
    return data_of(c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(handle), device));
  });
  add(module, "pool_stream", [](int priority) { return data_of(c10::cuda::getStreamFromPool(priority)); });
  add(module, "set_stream", &set_stream);
  add(module, "stream_handle", [](std::int64_t number, std::int64_t device, std::int64_t type) {
    return reinterpret_cast<std::uintptr_t>(stream_of(number, device, type).stream());
  });
  add(module, "stream_priority", [](std::int64_t number, std::int64_t device, std::int64_t type) {
    return stream_of(number, device, type).priority();
  });
  add(module, "priority_range", [] { return CUDAStream::priority_range(); });
  add(module, "sleep", &sleep_cycles);
  add(module, "elapsed_milliseconds", &elapsed_milliseconds);
  add(module, "is_capturing", &is_capturing);
  add(module, "set_capturing", [](bool capturing) { set_capturing(c10::cuda::getCurrentCUDAStream(), capturing); });
}

}  // namespace

void bind_device(pybind11::module_& module) {
  add(module, "initialize", &initialize);
  add(module, "is_in_bad_fork", [] { return forked_after_use.load(); });
  add(module, "device_count", [] { return static_cast<int>(c10::cuda::device_count()); });
  add(module, "current_device", [] { return static_cast<int>(c10::cuda::current_device()); });
  add(module, "set_device", [](c10::DeviceIndex device) { c10::cuda::set_device(device); });
  add(module, "exchange_device", [](c10::DeviceIndex device) {
    return static_cast<int>(device < 0 ? c10::DeviceIndex{-1} : c10::cuda::ExchangeDevice(device));
  });
  add(module, "maybe_exchange_device", [](c10::DeviceIndex device) {
    return static_cast<int>(device < 0 ? c10::DeviceIndex{-1} : c10::cuda::MaybeExchangeDevice(device));
  });
  add(module, "synchronize", [] { c10::cuda::device_synchronize(); });
  add(module, "can_access_peer", &can_access_peer);
  add(module, "set_sync_debug_mode",
      [](int mode) { c10::cuda::warning_state().set_sync_debug_mode(static_cast<c10::cuda::SyncDebugMode>(mode)); });
  add(module, "sync_debug_mode", [] { return static_cast<int>(c10::cuda::warning_state().get_sync_debug_mode()); });
  add(module, "error_text", [](int error) { return std::string(cudaGetErrorString(static_cast<cudaError_t>(error))); });
  module.def("properties", torch::wrap_pybind_function(&properties_as_dict));
  module.def("default_generator", [](c10::DeviceIndex device) {
    return pybind11::reinterpret_steal<pybind11::object>(
        THPGenerator_initDefaultGenerator(default_device_generator(device)));
  });
  bind_streams(module);
}

}  // namespace emulated_cuda
