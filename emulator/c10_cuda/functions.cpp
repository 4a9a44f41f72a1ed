// c10/cuda/CUDAFunctions.h, CUDAException.h, CUDAMiscFunctions.h and CUDADeviceAssertionHost.h on the emulated runtime.
//
// Every device has a context from the start, so MaybeSetDevice sets the device at once. Kernels have no assertions on
// the device, so the registry of launches keeps nothing.
#include <c10/cuda/CUDADeviceAssertionHost.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAMiscFunctions.h>

#include <memory>

namespace c10::cuda {

// ---- devices --------------------------------------------------------------------------------------------------------

DeviceIndex device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return static_cast<DeviceIndex>(count);
}

DeviceIndex device_count_ensure_non_zero() {
  const DeviceIndex count = device_count();
  TORCH_CHECK(count > 0, "No CUDA GPUs are available");
  return count;
}

DeviceIndex current_device() {
  DeviceIndex device = 0;
  C10_CUDA_CHECK(GetDevice(&device));
  return device;
}

void set_device(DeviceIndex device, const bool force) { C10_CUDA_CHECK(SetDevice(device, force)); }

cudaError_t GetDeviceCount(int* dev_count) { return cudaGetDeviceCount(dev_count); }

cudaError_t GetDevice(DeviceIndex* device) {
  int current = 0;
  const cudaError_t status = cudaGetDevice(&current);
  if (status == cudaSuccess) {
    *device = static_cast<DeviceIndex>(current);
  }
  return status;
}

cudaError_t SetDevice(DeviceIndex device, const bool force) {
  TORCH_CHECK(device >= 0, "a device's index is not negative: ", static_cast<int>(device));
  DeviceIndex current = -1;
  if (!force) {
    const cudaError_t status = GetDevice(&current);
    if (status != cudaSuccess) {
      return status;
    }
  }
  return current == device ? cudaSuccess : cudaSetDevice(device);
}

cudaError_t MaybeSetDevice(DeviceIndex device) { return SetDevice(device); }

DeviceIndex ExchangeDevice(DeviceIndex device) {
  const DeviceIndex before = current_device();
  set_device(device);
  return before;
}

DeviceIndex MaybeExchangeDevice(DeviceIndex device) { return ExchangeDevice(device); }

void SetTargetDevice() {}

bool hasPrimaryContext(DeviceIndex device_index) {
  TORCH_CHECK(device_index >= 0 && device_index < device_count(), "there is no CUDA device ",
              static_cast<int>(device_index));
  return true;
}

std::optional<DeviceIndex> getDeviceIndexWithPrimaryContext() {
  return device_count() > 0 ? std::optional(current_device()) : std::nullopt;
}

// ---- waits ----------------------------------------------------------------------------------------------------------

void device_synchronize() {
  if (warning_state().get_sync_debug_mode() != SyncDebugMode::L_DISABLED) {
    warn_or_error_on_sync();
  }
  C10_CUDA_CHECK(cudaDeviceSynchronize());
}

void warn_or_error_on_sync() {
  constexpr const char* kText = "called a synchronizing CUDA operation";
  TORCH_CHECK(warning_state().get_sync_debug_mode() != SyncDebugMode::L_ERROR, kText);
  if (warning_state().get_sync_debug_mode() == SyncDebugMode::L_WARN) {
    TORCH_WARN(kText);
  }
}

// ---- errors ---------------------------------------------------------------------------------------------------------

void c10_cuda_check_implementation(const int32_t err, const char* filename, const char* function_name,
                                   const uint32_t line_number, const bool /*include_device_assertions*/) {
  const auto error = static_cast<cudaError_t>(err);
  if (error == cudaSuccess) [[likely]] {
    return;
  }
  static_cast<void>(cudaGetLastError());
  std::string message = "CUDA error: ";
  message += cudaGetErrorString(error);
  message += get_cuda_error_help(error);
  message += get_cuda_async_error_suffix(error);
  throw AcceleratorError({function_name, filename, line_number}, err, std::move(message));
}

std::string get_cuda_error_help(cudaError_t error) noexcept {
  return std::string("\n(") + cudaGetErrorName(error) + ", from the emulated runtime)";
}

const char* get_cuda_check_suffix() noexcept { return "\nA later call may report the error of an earlier kernel."; }

const char* get_cuda_async_error_suffix(cudaError_t error) noexcept {
  return error == cudaErrorInvalidDevice ? "" : get_cuda_check_suffix();
}

/// Never destroyed, on purpose: memory may be freed until the process ends.
std::mutex* getFreeMutex() {
  static auto* const instance = std::make_unique<std::mutex>().release();
  return instance;
}

// ---- assertions on the device ---------------------------------------------------------------------------------------

CUDAKernelLaunchRegistry::CUDAKernelLaunchRegistry() = default;

uint32_t CUDAKernelLaunchRegistry::insert(const char* /*launch_filename*/, const char* /*launch_function*/,
                                          const uint32_t /*launch_linenum*/, const char* /*kernel_name*/,
                                          const int32_t /*stream_id*/) {
  return 0;
}

std::pair<std::vector<DeviceAssertionsData>, std::vector<CUDAKernelLaunchInfo>> CUDAKernelLaunchRegistry::snapshot()
    const {
  return {};
}

DeviceAssertionsData* CUDAKernelLaunchRegistry::get_uvm_assertions_ptr_for_current_device() { return nullptr; }

CUDAKernelLaunchRegistry& CUDAKernelLaunchRegistry::get_singleton_ref() {
  static CUDAKernelLaunchRegistry instance;
  return instance;
}

bool CUDAKernelLaunchRegistry::has_failed() const { return false; }

std::string c10_retrieve_device_side_assertion_info() { return "the emulated device has no assertions in kernels"; }

}  // namespace c10::cuda
