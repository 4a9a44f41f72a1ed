#include "csrc/base/place_sum.h"
#include "csrc/pytorch/cuda/cuda_place_sum.h"

namespace hydra {

namespace {

constexpr unsigned kPlaceThreads = 256;
constexpr unsigned kPlaceWarp = 32;
constexpr unsigned kPlaceBytes = 16;

__device__ inline std::uint64_t mixed(std::int64_t item, std::int64_t place) {
  std::uint64_t mix = static_cast<std::uint64_t>(item) * kPlaceFactor1;
  mix += static_cast<std::uint64_t>(place) * kPlaceFactor2;
  mix = (mix ^ static_cast<std::uint64_t>(static_cast<std::int64_t>(mix) >> kPlaceShift1)) * kPlaceFactor3;
  return mix ^ static_cast<std::uint64_t>(static_cast<std::int64_t>(mix) >> kPlaceShift2);
}

__device__ inline std::int64_t offset_of(const PlaceLayout& layout, std::int64_t place) {
  std::int64_t offset = 0;
  for (int i = layout.dimensions - 1; i > 0; --i) {
    offset += place % layout.sizes[static_cast<std::size_t>(i)] * layout.strides[static_cast<std::size_t>(i)];
    place /= layout.sizes[static_cast<std::size_t>(i)];
  }
  return offset + place * layout.strides[0];
}

/// The threads of a block take turns, so that a warp reads neighbours.
template <class Item>
__global__ void place_sum_kernel(const Item* items, const PlaceLayout layout, std::int64_t count,
                                 unsigned long long* sum) {
  constexpr unsigned kTurns = kPlaceBytes / sizeof(Item);
  __shared__ std::uint64_t sums[kPlaceThreads / kPlaceWarp];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kPlaceThreads * kTurns + threadIdx.x;
  std::uint64_t own = 0;
  for (unsigned turn = 0; turn < kTurns; ++turn) {
    const std::int64_t place = first + static_cast<std::int64_t>(turn) * kPlaceThreads;
    if (place < count) {
      own += mixed(items[offset_of(layout, place)], place);
    }
  }
  for (unsigned half = kPlaceWarp / 2; half > 0; half /= 2) {
    own += __shfl_down_sync(0xFFFFFFFFU, own, half);
  }
  if (threadIdx.x % kPlaceWarp == 0) {
    sums[threadIdx.x / kPlaceWarp] = own;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    std::uint64_t whole = 0;
    for (unsigned warp = 0; warp < kPlaceThreads / kPlaceWarp; ++warp) {
      whole += sums[warp];
    }
    atomicAdd(sum, static_cast<unsigned long long>(whole));
  }
}

template <class Item>
void launch_items(const void* items, const PlaceLayout& layout, std::int64_t count, unsigned long long* sum,
                  cudaStream_t stream) {
  constexpr std::int64_t kOfBlock = kPlaceThreads * (kPlaceBytes / sizeof(Item));
  const auto blocks = static_cast<unsigned>((count + kOfBlock - 1) / kOfBlock);
  place_sum_kernel<Item><<<blocks, kPlaceThreads, 0, stream>>>(static_cast<const Item*>(items), layout, count, sum);
}

}  // namespace

cudaError_t launch_place_sum(const void* items, int item_bytes, const PlaceLayout& layout, unsigned long long* sum,
                             cudaStream_t stream) noexcept {
  std::int64_t count = 1;
  for (int i = 0; i < layout.dimensions; ++i) {
    count *= layout.sizes[static_cast<std::size_t>(i)];
  }
  if (count == 0) {
    return cudaSuccess;
  }
  if (item_bytes == 1) {
    launch_items<std::int8_t>(items, layout, count, sum, stream);
  } else if (item_bytes == 2) {
    launch_items<std::int16_t>(items, layout, count, sum, stream);
  } else if (item_bytes == 4) {
    launch_items<std::int32_t>(items, layout, count, sum, stream);
  } else {
    launch_items<std::int64_t>(items, layout, count, sum, stream);
  }
  return cudaGetLastError();
}

}  // namespace hydra
