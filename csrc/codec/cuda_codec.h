// The codec on CUDA: the host's streams, byte for byte, written and read in the device's memory.
//
// All pointers are of the current device, a stream's, and the workspace's, at multiples of 16 bytes. Launches are
// asynchronous on `on`, return what they came to, and wait for nothing: how long a stream has become is in its own
// header (payload_bytes), and the host may read it when it likes. The workspace can be used again by what is launched
// behind on the same CUDA stream.
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/codec/codec.h"

namespace hydra::codec {

/// What either call needs to work in, for so many numbers.
Bytes workspace_bytes(std::int64_t count) noexcept;

/// `stream` has most_bytes().
cudaError_t launch_compress(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t count,
                            std::uint8_t* stream, void* workspace, cudaStream_t on) noexcept;

/// `header` is that of the stream, but for payload_bytes, which is not looked at; `bytes` of it can be read, all before
/// the payload and more.
/// *damaged becomes 1 where they are no whole stream, and the numbers are undefined then; otherwise 0.
cudaError_t launch_decompress(const StreamHeader& header, const std::uint8_t* stream, Bytes bytes, void* numbers,
                              void* workspace, std::uint32_t* damaged, cudaStream_t on) noexcept;

}  // namespace hydra::codec
