// The sum of place_sum.h over an array on CUDA, in one launch, and in one pass over the array.
//
// All memory is on the current device and is the caller's. Launches are asynchronous on `stream`, and return the status
// of the launch. A place is the number of an item in the order of the dimensions, the last one fastest.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

namespace hydra {

/// How items lie: sizes and strides, in items.
struct PlaceLayout {
  static constexpr int kMost = 5;

  int dimensions = 0;
  std::array<std::int64_t, kMost> sizes{};
  std::array<std::int64_t, kMost> strides{};
};

/// Adds to `*sum`. `item_bytes` is 1, 2, 4 or 8.
cudaError_t launch_place_sum(const void* items, int item_bytes, const PlaceLayout& layout, unsigned long long* sum,
                             cudaStream_t stream) noexcept;

}  // namespace hydra
