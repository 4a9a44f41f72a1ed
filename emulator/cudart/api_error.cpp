// CUDA's calls about errors.
#include <algorithm>
#include <array>
#include <utility>

#include "emulator/cudart/call.h"

namespace {

using namespace emulated_cuda;
using namespace emulated_cuda::cudart;

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

// The codes that the emulator gives, that tests script, and that torch looks for.
constexpr std::array kErrors{
    ErrorText{cudaSuccess, "cudaSuccess", "no error"},
    ErrorText{cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    ErrorText{cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    ErrorText{cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    ErrorText{cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
    ErrorText{cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    ErrorText{cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    ErrorText{cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
              "CUDA driver version is insufficient for CUDA runtime version"},
    ErrorText{cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    ErrorText{cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    ErrorText{cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    ErrorText{cudaErrorInvalidKernelImage, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    ErrorText{cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    ErrorText{cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
              "no kernel image is available for execution on the device"},
    ErrorText{cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    ErrorText{cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    ErrorText{cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    ErrorText{cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    ErrorText{cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    ErrorText{cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
              "too many resources requested for launch"},
    ErrorText{cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    ErrorText{cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    ErrorText{cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    ErrorText{cudaErrorContextIsDestroyed, "cudaErrorContextIsDestroyed", "context is destroyed"},
    ErrorText{cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    ErrorText{cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
              "part or all of the requested memory range is already mapped"},
    ErrorText{cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
              "pointer does not correspond to a registered memory region"},
    ErrorText{cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    ErrorText{cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    ErrorText{cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    ErrorText{cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    ErrorText{cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
              "operation not permitted when stream is capturing"},
    ErrorText{cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
              "operation failed due to a previous error during capture"},
    ErrorText{cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
              "operation would make the legacy stream depend on a capturing blocking stream"},
    ErrorText{cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
              "attempt to terminate a thread-local capture sequence from another thread"},
    ErrorText{cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText* text_of(cudaError_t error) {
  const auto* const found = std::ranges::find(kErrors, error, &ErrorText::error);
  return found == kErrors.end() ? nullptr : &*found;
}

/// The last error; that of a failed device goes before it, and cannot be cleared.
cudaError_t last_error(const char* name, bool clear) {
  Machine& machine = Machine::get();
  if (machine.forked()) {
    return cudaErrorInitializationError;
  }
  machine.script.count(name);
  const cudaError_t error = clear ? std::exchange(this_thread().last_error, cudaSuccess) : this_thread().last_error;
  const cudaError_t fault = machine.current().fault;
  return fault == cudaSuccess ? error : fault;
}

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaGetLastError() { return last_error("cudaGetLastError", /*clear=*/true); }

cudaError_t CUDARTAPI cudaPeekAtLastError() { return last_error("cudaPeekAtLastError", /*clear=*/false); }

const char* CUDARTAPI cudaGetErrorName(cudaError_t error) {
  const ErrorText* const known = text_of(error);
  return known == nullptr ? "unrecognized error code" : known->name;
}

const char* CUDARTAPI cudaGetErrorString(cudaError_t error) {
  const ErrorText* const known = text_of(error);
  return known == nullptr ? "unrecognized error code" : known->text;
}

}  // extern "C"
