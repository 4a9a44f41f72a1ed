#include "emulator/kernels/executor.h"

#include <atomic>
#include <mutex>

#include "emulator/cudart/call.h"
#include "emulator/cudart/control.h"

namespace emulated_cuda::kernels {

namespace {

struct LastError {
  std::mutex mutex;
  std::string text;
};

LastError& last() {
  static LastError instance;
  return instance;
}

std::atomic<std::uint64_t> g_seed{0};

bool within(const dim3& extent, const dim3& most) noexcept {
  return extent.x > 0 && extent.y > 0 && extent.z > 0 && extent.x <= most.x && extent.y <= most.y && extent.z <= most.z;
}

/// Under the virtual clock: what a thread reads and writes, about as much as one of an optimizer's step.
constexpr double kBytesOfThread = 28.0;

double threads_of(const Configuration& configuration) noexcept {
  const auto volume = [](const dim3& extent) { return static_cast<double>(extent.x) * extent.y * extent.z; };
  return volume(configuration.grid) * volume(configuration.block);
}

bool valid(const Configuration& configuration) noexcept {
  const dim3 most_blocks{0x7FFFFFFFU, 0xFFFFU, 0xFFFFU};
  const dim3 most_threads{1024, 1024, 64};
  const dim3& block = configuration.block;
  return within(configuration.grid, most_blocks) && within(block, most_threads) && block.x * block.y * block.z <= 1024;
}

}  // namespace

void launch_grid(const char* kernel, const Configuration& configuration, std::function<void()> thread) {
  if (!valid(configuration)) {
    cudart::note_error(cudaErrorInvalidConfiguration);
    return;
  }
  const Grid grid{kernel, configuration.grid, configuration.block, Random(g_seed++).next()};
  const auto run = [grid, thread = std::move(thread)] {
    try {
      run_grid(grid, thread);
    } catch (const KernelError& error) {
      const std::lock_guard lock(last().mutex);
      last().text = error.what();
      throw;
    }
  };
  launch(configuration.stream, run, {.bytes = kBytesOfThread * threads_of(configuration)});
}

void run_grid(const Grid& grid, const std::function<void()>& thread) {
  run_blocks(grid, order_of_blocks(grid), thread);
}

void set_seed(std::uint64_t seed) noexcept { g_seed = seed; }

std::string last_error() {
  const std::lock_guard lock(last().mutex);
  return last().text;
}

}  // namespace emulated_cuda::kernels
