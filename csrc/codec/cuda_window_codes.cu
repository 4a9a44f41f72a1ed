#include "csrc/codec/cuda_window_codes.h"

namespace hydra::codec {

namespace {

constexpr unsigned kThreads = 256;
constexpr std::int64_t kMostBlocks = 1 << 20;  // for larger streams each thread takes several bytes

unsigned blocks_of(Bytes bytes) {
  const std::int64_t blocks = (bytes + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

__global__ void encode_kernel(PoolGeometry geometry, const std::int64_t* indices, std::uint8_t* stream,
                              std::uint32_t* wrong) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  bool any = false;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < geometry.stream_bytes();
       at += step) {
    stream[at] = geometry.encoded(indices, at / geometry.row_bytes(), at % geometry.row_bytes(), any);
  }
  if (any) {
    atomicExch(wrong, 1U);
  }
}

__global__ void decode_kernel(PoolGeometry geometry, const std::uint8_t* stream, std::int64_t* indices) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < geometry.stream_bytes();
       at += step) {
    geometry.decode(stream[at], indices, at / geometry.row_bytes(), at % geometry.row_bytes());
  }
}

}  // namespace

cudaError_t launch_encode_windows(const PoolGeometry& geometry, const std::int64_t* indices, std::uint8_t* stream,
                                  std::uint32_t* wrong, cudaStream_t on) noexcept {
  const cudaError_t status = cudaMemsetAsync(wrong, 0, sizeof *wrong, on);
  if (status != cudaSuccess || geometry.stream_bytes() == 0) {
    return status;
  }
  encode_kernel<<<blocks_of(geometry.stream_bytes()), kThreads, 0, on>>>(geometry, indices, stream, wrong);
  return cudaGetLastError();
}

cudaError_t launch_decode_windows(const PoolGeometry& geometry, const std::uint8_t* stream, std::int64_t* indices,
                                  cudaStream_t on) noexcept {
  if (geometry.stream_bytes() == 0) {
    return cudaSuccess;
  }
  decode_kernel<<<blocks_of(geometry.stream_bytes()), kThreads, 0, on>>>(geometry, stream, indices);
  return cudaGetLastError();
}

}  // namespace hydra::codec
