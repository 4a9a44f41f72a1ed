// A grid, its blocks and their shared memory; and what an executor gives to device code.
//
// A build has one executor. fiber_executor.cpp runs the threads of a block as fibers of the calling thread, in an order
// that a seed varies, and is fast. thread_executor.cpp runs them as threads of the system, so that ThreadSanitizer sees
// races; the system gives the order.
#pragma once

#include <cuda_runtime_api.h>

#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "emulator/kernels/meeting.h"

// CUDA's names. Each thread of a block finds its own values. They are variables because a fiber is not a thread.
extern thread_local constinit uint3 threadIdx;
extern thread_local constinit uint3 blockIdx;
extern thread_local constinit dim3 blockDim;
extern thread_local constinit dim3 gridDim;

namespace emulated_cuda::kernels {

/// Numbers from a seed: cheap, and equal on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept;
  /// At least 0, and less than `end`.
  unsigned below(unsigned end) noexcept { return static_cast<unsigned>((next() >> 32) * end >> 32); }
  template <class Value>
  void shuffle(std::span<Value> values) noexcept {
    for (std::size_t left = values.size(); left > 1; --left) {
      std::swap(values[left - 1], values[next() % left]);
    }
  }

 private:
  std::uint64_t state_;
};

struct Grid {
  const char* kernel;
  dim3 blocks;
  dim3 threads;
  std::uint64_t seed = 0;

  unsigned threads_of_block() const noexcept { return threads.x * threads.y * threads.z; }
};

/// The coordinates of a block or a thread. x varies first, as in CUDA.
uint3 coordinates(std::uint64_t number, const dim3& extent) noexcept;
/// All blocks of a grid, as numbers, in the order in which they run.
std::vector<std::uint64_t> order_of_blocks(const Grid& grid);

/// The shared memory of one block. Each variable lies apart, so that AddressSanitizer sees an access beside it.
class SharedMemory {
 public:
  explicit SharedMemory(std::uint64_t seed) noexcept : poison_(seed) {}
  /// The variable of this key. At first its bytes are random.
  void* find(const void* key, std::size_t bytes, std::size_t alignment);

 private:
  struct Free {
    std::align_val_t alignment;
    void operator()(void* bytes) const noexcept { ::operator delete(bytes, alignment); }
  };
  struct Variable {
    const void* key;
    std::unique_ptr<void, Free> bytes;
  };

  Random poison_;
  std::vector<Variable> variables_;
};

/// What went wrong in a block, as a text for an error.
std::string failure_of(const Grid& grid, const uint3& block, const std::string& reason);

/// A device's floating-point mode for a scope: the mode of the host thread that launches must not matter.
class DeviceFloats {
 public:
  DeviceFloats() noexcept {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DeviceFloats() { std::fesetenv(&before_); }
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;

 private:
  std::fenv_t before_{};
};

/// Ends a thread of a block that has failed; no kernel may catch it.
struct Abandoned {};

// ---- what an executor gives -----------------------------------------------------------------------------------------

/// Runs blocks in this order; `thread` is the body of each thread. Throws KernelError.
void run_blocks(const Grid& grid, const std::vector<std::uint64_t>& order, const std::function<void()>& thread);

// For the thread of a block that calls:
/// Returns what the operation gives to this lane.
std::uint64_t meet_in_warp(const Operation& operation, const Offer& offer);
void meet_in_block(const Operation& barrier);
void* shared_variable(const void* key, std::size_t bytes, std::size_t alignment);

}  // namespace emulated_cuda::kernels
