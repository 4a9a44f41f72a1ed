// Launches kernels: functions whose text translate.py has made out of a CUDA source.
//
// A launch copies its arguments when it is called, and runs the kernel in the stream's turn, on the stream's thread.
// The blocks of a grid run in an order drawn from a seed. So do the threads of a block between barriers, if they are
// fibers. Shared memory is poisoned before each block. A kernel that breaks the rules of barriers is abandoned, and its
// device fails with cudaErrorLaunchFailure; last_error() says why. A kernel must not wait for what another thread
// writes, except at a barrier. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "emulator/kernels/block.h"

namespace emulated_cuda::kernels {

/// What stands between <<< and >>>.
struct Configuration {
  Configuration(dim3 of_grid, dim3 of_block, std::size_t /*dynamic memory, which is 0*/ = 0,
                cudaStream_t on = nullptr) noexcept
      : grid(of_grid), block(of_block), stream(on) {}

  dim3 grid;
  dim3 block;
  cudaStream_t stream;
};

/// Enqueues a grid. `thread` is called by each thread of each block. An error becomes the calling thread's last one, as
/// with CUDA: cudaErrorInvalidConfiguration for a grid or a block of a size that no GPU runs.
void launch_grid(const char* kernel, const Configuration& configuration, std::function<void()> thread);

/// What a launch in a translated source calls.
template <class... Parameters>
void launch_kernel(const char* name, const Configuration& configuration, void (*kernel)(Parameters...),
                   std::type_identity_t<Parameters>... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "CUDA copies the bytes of a kernel's arguments");
  launch_grid(name, configuration,
              [kernel, ... copies = std::move(arguments)] { kernel(copies...); });  // each thread has its own copies
}

/// Runs a grid on the calling thread, at once. Throws KernelError.
void run_grid(const Grid& grid, const std::function<void()>& thread);

/// The seed of the next launch; each later one draws another from it.
void set_seed(std::uint64_t seed) noexcept;
/// Why the last kernel failed that did; empty if none has.
std::string last_error();

}  // namespace emulated_cuda::kernels
