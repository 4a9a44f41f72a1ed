// One thread takes each number: the loops of the host's kernels with vectors of one. Compiled without fused
// multiply-adds, and with correctly rounded divisions and square roots, so that the bits equal the host's.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <variant>

#include "csrc/base/half.h"
#include "csrc/optim/cuda_step.h"
#include "csrc/optim/kernels/kernels.h"

namespace hydra {

namespace {

#define HYDRA_INLINE __device__ inline
#define HYDRA_KERNEL __device__ static

#include "csrc/optim/kernels/scalar_vector.h"

static_assert(Vector::kWidth == 1, "no numbers are left at the end");

#include "csrc/optim/kernels/kernel_frame.h"

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1 << 16;

__global__ void update_kernel(const ParameterUpdate update, float scale) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < update.count;
       at += stride) {
    run_vectors(update, at, at + 1, scale);
  }
}

/// One warp sums each chunk, with one thread for each lane of the sum.
__global__ void chunk_sums_kernel(const void* data, NumberFormat format, std::int64_t count, double* chunks) {
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kNormChunk;
  const std::int64_t end = min(begin + kNormChunk, count);
  double sum = 0.0;
  for (std::int64_t at = begin + threadIdx.x; at < end; at += kNormLanes) {
    const double value = number(data, format, at);
    sum += value * value;
  }
  for (unsigned half = kNormLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xFFFFFFFFU, sum, half);
  }
  if (threadIdx.x == 0) {
    chunks[blockIdx.x] = sum;
  }
}

}  // namespace

cudaError_t launch_update(const ParameterUpdate& update, float scale, cudaStream_t stream) noexcept {
  if (update.count == 0) {
    return cudaSuccess;
  }
  const std::int64_t blocks = std::min((update.count + kThreads - 1) / kThreads, kMostBlocks);
  update_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(update, scale);
  return cudaGetLastError();
}

cudaError_t launch_chunk_sums(const NormInput& input, double* chunks, cudaStream_t stream) noexcept {
  if (input.count == 0) {
    return cudaSuccess;
  }
  const auto blocks = static_cast<unsigned>(norm_chunks(input));
  chunk_sums_kernel<<<blocks, kNormLanes, 0, stream>>>(input.data, input.format, input.count, chunks);
  return cudaGetLastError();
}

}  // namespace hydra
