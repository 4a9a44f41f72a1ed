// The codec on CUDA: reads and writes streams in device memory, byte for byte those of the host.
//
// All pointers are of the current device. Streams and the workspace begin at multiples of 16 bytes.
// Launches are asynchronous on the CUDA stream `on`, wait for nothing, and return the status of the launch.
// The length of a compressed stream is in its header (payload_bytes), which the host may read later.
// Later launches on the same CUDA stream may use the workspace again. Memory is the caller's; sizes are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/codec/codec.h"

namespace hydra::codec {

/// The size of the workspace that either call needs for `count` numbers.
Bytes workspace_bytes(std::int64_t count) noexcept;

/// Compresses `count` numbers to `stream`, which has most_bytes().
cudaError_t launch_compress(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t count,
                            std::uint8_t* stream, void* workspace, cudaStream_t on) noexcept;

/// Restores header.count numbers. `header` is the stream's header; its payload_bytes is ignored. `bytes` of the stream
/// are readable, at least up to its payload. *damaged becomes 1 if they are not a complete stream, and the numbers are
/// undefined then; otherwise it becomes 0.
cudaError_t launch_decompress(const StreamHeader& header, const std::uint8_t* stream, Bytes bytes, void* numbers,
                              void* workspace, std::uint32_t* damaged, cudaStream_t on) noexcept;

}  // namespace hydra::codec
