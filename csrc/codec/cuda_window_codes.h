// Window codes on CUDA: the host's bytes. All pointers are of the current device; launches are asynchronous on `on`.
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/codec/window_codes.h"

namespace hydra::codec {

/// *wrong becomes 1 where an index is in no window, and the codes are undefined then; otherwise 0.
cudaError_t launch_encode_windows(const PoolGeometry& geometry, const std::int64_t* indices, std::uint8_t* stream,
                                  std::uint32_t* wrong, cudaStream_t on) noexcept;
cudaError_t launch_decode_windows(const PoolGeometry& geometry, const std::uint8_t* stream, std::int64_t* indices,
                                  cudaStream_t on) noexcept;

}  // namespace hydra::codec
