// Copies between tensors of the host and of devices, as CUDA orders them.
//
// A copy on one device, or from one device to another, runs behind the host. One from or to the host is waited for,
// unless the caller asks not to wait: then it reads and writes pinned memory late, and pageable memory before it
// returns. The caching host allocator learns which streams use its memory. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace emulated_cuda {

/// One of them at least is of a device. Broadcasts `from`.
void copy_tensor(const at::Tensor& to, const at::Tensor& from, bool non_blocking);

/// The value of a tensor with one element; waits.
at::Scalar read_scalar(const at::Tensor& tensor);

}  // namespace emulated_cuda
