// The CUDA kernels of DeviceMath. All memory is on the current device and is the caller's.
//
// Launches are asynchronous on `stream`, and return the status of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "csrc/optim/norm.h"

namespace hydra {

cudaError_t launch_update(const ParameterUpdate& update, float scale, cudaStream_t stream) noexcept;
/// Writes the sum of each chunk of the input to `chunks`: norm_chunks(input) numbers.
cudaError_t launch_chunk_sums(const NormInput& input, double* chunks, cudaStream_t stream) noexcept;

constexpr std::int64_t norm_chunks(const NormInput& input) noexcept {
  return (input.count + kNormChunk - 1) / kNormChunk;
}

}  // namespace hydra
