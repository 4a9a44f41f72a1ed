// The kernels of DeviceMath on CUDA. Memory is the device's; launches are asynchronous, on `stream` of the current
// device, and return what the launch came to.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "csrc/optim/norm.h"

namespace hydra {

cudaError_t launch_update(const ParameterUpdate& update, float scale, cudaStream_t stream) noexcept;
/// `chunks` gets the sum of each chunk of the input: norm_chunks(input) numbers.
cudaError_t launch_chunk_sums(const NormInput& input, double* chunks, cudaStream_t stream) noexcept;

constexpr std::int64_t norm_chunks(const NormInput& input) noexcept {
  return (input.count + kNormChunk - 1) / kNormChunk;
}

}  // namespace hydra
