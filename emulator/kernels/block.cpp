#include "emulator/kernels/block.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

thread_local constinit uint3 threadIdx{};
thread_local constinit uint3 blockIdx{};
thread_local constinit dim3 blockDim{};
thread_local constinit dim3 gridDim{};

namespace emulated_cuda::kernels {

std::uint64_t Random::next() noexcept {  // splitmix64
  state_ += 0x9E3779B97F4A7C15U;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
  return mixed ^ (mixed >> 31);
}

uint3 coordinates(std::uint64_t number, const dim3& extent) noexcept {
  return {static_cast<unsigned>(number % extent.x), static_cast<unsigned>(number / extent.x % extent.y),
          static_cast<unsigned>(number / extent.x / extent.y)};
}

std::vector<std::uint64_t> order_of_blocks(const Grid& grid) {
  std::vector<std::uint64_t> order(std::size_t{grid.blocks.x} * grid.blocks.y * grid.blocks.z);
  std::iota(order.begin(), order.end(), 0);
  Random(grid.seed).shuffle(std::span(order));
  return order;
}

void* SharedMemory::find(const void* key, std::size_t bytes, std::size_t alignment) {
  const auto found = std::ranges::find(variables_, key, &Variable::key);
  if (found != variables_.end()) {
    return found->bytes.get();
  }
  const std::align_val_t aligned{alignment};
  std::unique_ptr<void, Free> made(::operator new(bytes, aligned), Free{aligned});
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t poison = poison_.next();
    std::memcpy(static_cast<std::byte*>(made.get()) + at, &poison, std::min(sizeof poison, bytes - at));
  }
  return variables_.emplace_back(key, std::move(made)).bytes.get();
}

std::string failure_of(const Grid& grid, const uint3& block, const std::string& reason) {
  return std::string("kernel ") + grid.kernel + ", block (" + std::to_string(block.x) + ", " + std::to_string(block.y) +
         ", " + std::to_string(block.z) + "): " + reason;
}

}  // namespace emulated_cuda::kernels
