// Each warp takes a group of 32 blocks; warp_block.h and warp_group.h have the work on a block. Compiled without fused
// multiply-adds, so that the bits equal the host's.
#include <bit>
#include <cmath>
#include <cstdint>

#include "csrc/base/half.h"
#include "csrc/codec/cuda_codec.h"
#include "csrc/codec/layout.h"

namespace hydra::codec {

namespace {

#define HYDRA_INLINE __device__ inline

struct Warp {
  template <class T>
  struct Each {
    T value{};
    __device__ T& operator[](int) { return value; }
    __device__ const T& operator[](int) const { return value; }
  };

  static constexpr unsigned kAll = 0xFFFFFFFFU;

  static __device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  template <class F>
  static __device__ void each(F body) {
    body(lane());
  }
  template <class F>
  static __device__ std::uint32_t ballot(F condition) {
    return __ballot_sync(kAll, condition(lane()));
  }
  static __device__ int least(const Each<int>& each) { return __reduce_min_sync(kAll, each.value); }
  static __device__ int greatest(const Each<int>& each) { return __reduce_max_sync(kAll, each.value); }
  static __device__ std::uint32_t sum(const Each<std::uint32_t>& each) { return __reduce_add_sync(kAll, each.value); }
  static __device__ void add_bits(std::uint32_t& word, std::uint32_t bits) { atomicOr(&word, bits); }
  static __device__ void meet() { __syncwarp(); }
};

#include "csrc/codec/warp_block.h"
#include "csrc/codec/warp_group.h"

constexpr int kWarps = 8;
constexpr int kScanThreads = 1024;
constexpr int kWalkThreads = 32;

__device__ std::int64_t own_group() { return static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; }

__device__ std::int64_t begin_of(const std::int64_t* ends, std::int64_t chunk) {
  return chunk == 0 ? 0 : ends[chunk - 1];
}

__device__ const std::int64_t* ends_of(const std::uint8_t* stream) {
  return reinterpret_cast<const std::int64_t*>(stream + kHeaderBytes);
}

__global__ void measure_kernel(const Quantizer quantizer, Choice choice, const NumberArray<const void*> numbers,
                               std::uint8_t* tags, std::uint32_t* group_bytes) {
  const std::int64_t group = own_group();
  if (group >= groups_of(numbers.blocks)) {
    return;
  }
  const std::uint32_t bytes = measure_group(quantizer, choice, numbers, group, tags);
  if (Warp::lane() == 0) {
    group_bytes[group] = bytes;
  }
}

__device__ std::int64_t chunk_bytes(const std::uint32_t* group_bytes, std::int64_t chunk, std::int64_t groups) {
  std::int64_t bytes = 0;
  for (std::int64_t group = chunk * kChunkGroups; group < groups && group < (chunk + 1) * kChunkGroups; ++group) {
    bytes += group_bytes[group];
  }
  return bytes;
}

/// Writes the ends of all chunks, a thousand at a time, the header, and the zeros behind the tags. One thread block.
__global__ void finish_kernel(StreamHeader header, const Layout layout, const std::uint32_t* group_bytes,
                              std::uint8_t* stream) {
  __shared__ std::int64_t sums[kScanThreads];
  auto* const ends = reinterpret_cast<std::int64_t*>(stream + kHeaderBytes);
  const auto own = static_cast<std::int64_t>(threadIdx.x);
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < layout.chunks; first += kScanThreads) {
    const std::int64_t chunk = first + own;
    sums[own] = chunk < layout.chunks ? chunk_bytes(group_bytes, chunk, groups_of(layout.blocks)) : 0;
    __syncthreads();
    for (int distance = 1; distance < kScanThreads; distance *= 2) {
      const std::int64_t other = own >= distance ? sums[own - distance] : 0;
      __syncthreads();
      sums[own] += other;
      __syncthreads();
    }
    if (chunk < layout.chunks) {
      ends[chunk] = before + sums[own];
    }
    before += sums[kScanThreads - 1];
    __syncthreads();
  }
  if (layout.tags + layout.blocks + own < layout.payload) {
    stream[layout.tags + layout.blocks + own] = 0;
  }
  if (own == 0) {
    header.payload_bytes = before;
    *reinterpret_cast<StreamHeader*>(stream) = header;
  }
}

__global__ void write_kernel(const Quantizer quantizer, Choice choice, const NumberArray<const void*> numbers,
                             const std::uint32_t* group_bytes, std::uint8_t* stream, Bytes payload) {
  __shared__ std::uint32_t words[kWarps][kStagedWords];
  const std::int64_t group = own_group();
  if (group >= groups_of(numbers.blocks)) {
    return;
  }
  const std::int64_t begin = begin_of(ends_of(stream), group / kChunkGroups) + bytes_before(group_bytes, group);
  write_group(quantizer, choice, numbers, group, words[threadIdx.x / 32], stream + payload + begin);
}

/// Finds the groups of each chunk, with one thread for each chunk.
__global__ void find_kernel(NumberFormat format, const Layout layout, const std::uint8_t* stream, Bytes payload_bytes,
                            std::uint32_t* begins, std::uint32_t* damaged) {
  const std::int64_t chunk = static_cast<std::int64_t>(blockIdx.x) * kWalkThreads + threadIdx.x;
  if (chunk >= layout.chunks) {
    return;
  }
  const std::int64_t begin = begin_of(ends_of(stream), chunk);
  const std::int64_t end = ends_of(stream)[chunk];
  const bool whole = begin >= 0 && begin <= end && end <= payload_bytes &&
                     find_groups(format, stream + layout.tags + chunk * kChunkBlocks, layout.blocks_of(chunk),
                                 stream + layout.payload + begin, end - begin, begins + chunk * kChunkGroups);
  if (!whole) {
    atomicExch(damaged, 1U);  // several threads may say so
  }
}

__global__ void read_kernel(NumberFormat format, float step, const NumberArray<void*> numbers, const Layout layout,
                            const std::uint8_t* stream, const std::uint32_t* begins, const std::uint32_t* damaged) {
  __shared__ std::uint32_t words[kWarps][kStagedWords];
  const std::int64_t group = own_group();
  if (group >= groups_of(numbers.blocks) || *damaged != 0) {
    return;
  }
  const std::int64_t begin = begin_of(ends_of(stream), group / kChunkGroups) + begins[group];
  read_group(format, step, numbers, group, stream + layout.tags, stream + layout.payload + begin,
             words[threadIdx.x / 32]);
}

unsigned thread_blocks(std::int64_t work, std::int64_t each) noexcept {
  return static_cast<unsigned>((work + each - 1) / each);
}

}  // namespace

Bytes workspace_bytes(std::int64_t count) noexcept {
  return groups_of(Layout(count).blocks) * static_cast<Bytes>(sizeof(std::uint32_t));
}

cudaError_t launch_compress(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t count,
                            std::uint8_t* stream, void* workspace, cudaStream_t on) noexcept {
  const Layout layout(count);
  const NumberArray<const void*> from{numbers, count, layout.blocks};
  auto* const group_bytes = static_cast<std::uint32_t*>(workspace);
  const unsigned grid = thread_blocks(groups_of(layout.blocks), kWarps);
  if (count > 0) {
    measure_kernel<<<grid, 32 * kWarps, 0, on>>>(quantizer, choice, from, stream + layout.tags, group_bytes);
  }
  finish_kernel<<<1, kScanThreads, 0, on>>>(make_header(quantizer, count, 0), layout, group_bytes, stream);
  if (count > 0) {
    write_kernel<<<grid, 32 * kWarps, 0, on>>>(quantizer, choice, from, group_bytes, stream, layout.payload);
  }
  return cudaGetLastError();
}

cudaError_t launch_decompress(const StreamHeader& header, const std::uint8_t* stream, Bytes bytes, void* numbers,
                              void* workspace, std::uint32_t* damaged, cudaStream_t on) noexcept {
  const Layout layout(header.count);
  const cudaError_t status = cudaMemsetAsync(damaged, 0, sizeof *damaged, on);
  if (status != cudaSuccess || header.count == 0) {
    return status;
  }
  const NumberArray<void*> to{numbers, header.count, layout.blocks};
  auto* const begins = static_cast<std::uint32_t*>(workspace);
  find_kernel<<<thread_blocks(layout.chunks, kWalkThreads), kWalkThreads, 0, on>>>(
      header.format, layout, stream, bytes - layout.payload, begins, damaged);
  read_kernel<<<thread_blocks(groups_of(layout.blocks), kWarps), 32 * kWarps, 0, on>>>(header.format, header.step, to,
                                                                                       layout, stream, begins, damaged);
  return cudaGetLastError();
}

}  // namespace hydra::codec
