// Kernels for operators or dtypes that torch has for CUDA alone, or whose CPU kernel draws from the CPU's default
// generator: by the CPU's other operators.
//
// They run on a stream's thread, on CPU tensors. Thread-safe.
#pragma once

#include <string>

#include "emulator/torch/operator_traits.h"

namespace emulated_cuda {

/// Null if the CPU's own kernel serves.
HostKernel host_kernel(const std::string& operator_name);

}  // namespace emulated_cuda
