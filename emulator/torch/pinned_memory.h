// Pinned host memory for tensors: torch's own caching host allocator over cudaHostAlloc.
//
// A block that copies have used is reused only when the events recorded at its end have been reached. The allocator
// lives as long as the process. Thread-safe.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace emulated_cuda {

at::HostAllocator& pinned_allocator();
/// Whether an address lies in page-locked memory; false as long as no device is in use.
bool is_pinned(const void* address);

}  // namespace emulated_cuda
