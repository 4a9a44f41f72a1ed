// The matrix library's workspaces, as torch keeps them: one for each pair of a handle and a stream.
//
// A thread takes a handle of each device when it first multiplies matrices there, and returns it when it ends. So there
// are as many handles as threads have multiplied at the same time. A workspace comes from torch's caching allocator, on
// the current stream. It stays until all are cleared, or until a larger one is asked for. Thread-safe. Sizes are bytes.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace emulated_cuda {

/// Makes sure that the calling thread has a workspace on the device, which is the current one.
void take_workspace(c10::DeviceIndex device);
/// Frees all workspaces of the process. Work that other threads are about to enqueue may still use them.
void clear_workspaces();

/// As CUBLAS_WORKSPACE_CONFIG says, else as torch chooses for the device, unless it was set.
std::size_t workspace_bytes();
void set_workspace_bytes(std::size_t bytes);
void reset_workspace_bytes();

}  // namespace emulated_cuda
