// Window codes on CUDA, byte for byte those of the host (window_codes.h).
//
// All pointers are of the current device. Launches are asynchronous on the CUDA stream `on`, and return the status of
// the launch. Memory is the caller's.
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/codec/window_codes.h"

namespace hydra::codec {

/// *wrong becomes 1 if an index lies outside its window, and the codes are undefined then; otherwise it becomes 0.
cudaError_t launch_encode_windows(const PoolGeometry& geometry, const std::int64_t* indices, std::uint8_t* stream,
                                  std::uint32_t* wrong, cudaStream_t on) noexcept;
cudaError_t launch_decode_windows(const PoolGeometry& geometry, const std::uint8_t* stream, std::int64_t* indices,
                                  cudaStream_t on) noexcept;

}  // namespace hydra::codec
