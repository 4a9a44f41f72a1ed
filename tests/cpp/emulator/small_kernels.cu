// Kernels for the executor's tests: a few that keep the rules, and one for each way to break them.
#include <cstdint>
#include <source_location>

namespace small_kernels {

constexpr unsigned kThreads = 64;

struct Triple {
  int values[3];
};

// ---- kernels that keep the rules ------------------------------------------------------------------------------------

/// Writes each block's numbers backwards.
__global__ void reverse(const int* from, int* to) {
  __shared__ int staged[kThreads];
  const unsigned first = blockIdx.x * blockDim.x;
  staged[threadIdx.x] = from[first + threadIdx.x];
  __syncthreads();
  to[first + threadIdx.x] = staged[blockDim.x - 1 - threadIdx.x];
}

__device__ int sum_of(const Triple& triple) { return triple.values[0] + triple.values[1] + triple.values[2]; }

__global__ void store_sum(const Triple triple, int* to) { *to = sum_of(triple); }

template <class Value, int kFactor>
__global__ void multiply(Value* numbers) {
  numbers[threadIdx.x] *= kFactor;
}

__global__ void note_order(unsigned* count, unsigned* order) {
  order[atomicAdd(count, 1U)] = blockIdx.x * blockDim.x + threadIdx.x;
}

/// Notes for each thread its coordinates, as digits of one number.
__global__ void note_coordinates(std::uint64_t* to) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  std::uint64_t digits = 0;
  for (const unsigned digit : {blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z}) {
    digits = 10 * digits + digit;
  }
  to[block * blockDim.x * blockDim.y * blockDim.z + thread] = digits;
}

/// What each operation gives to each lane of one warp.
struct WarpResults {
  std::uint32_t votes[32];
  int least[32];
  int greatest[32];
  std::uint32_t least_unsigned[32];
  std::uint32_t greatest_unsigned[32];
  int sum[32];
  std::uint32_t sum_unsigned[32];
  float shifted[32];
  double shifted_twice[32];
};

/// Only lanes of the mask take part.
__global__ void combine(const int* numbers, unsigned mask, unsigned delta, WarpResults* to) {
  const unsigned lane = threadIdx.x;
  if ((mask >> lane & 1U) == 0) {
    return;
  }
  const int number = numbers[lane];
  const auto pattern = static_cast<std::uint32_t>(number);
  to->votes[lane] = __ballot_sync(mask, number > 0);
  to->least[lane] = __reduce_min_sync(mask, number);
  to->greatest[lane] = __reduce_max_sync(mask, number);
  to->least_unsigned[lane] = __reduce_min_sync(mask, pattern);
  to->greatest_unsigned[lane] = __reduce_max_sync(mask, pattern);
  to->sum[lane] = __reduce_add_sync(mask, number);
  to->sum_unsigned[lane] = __reduce_add_sync(mask, pattern);
  to->shifted[lane] = __shfl_down_sync(mask, static_cast<float>(number), delta);
  to->shifted_twice[lane] = __shfl_down_sync(mask, 0.1 * number, lane % 4);
}

__global__ void update_atomically(std::uint32_t* words) {
  const std::uint32_t own = 1U << threadIdx.x;
  atomicOr(&words[0], own);
  atomicAdd(&words[1], own);
  words[2 + atomicExch(&words[35], threadIdx.x)] += 1;  // each value but the last one comes back once
}

__global__ void divide(const float* numbers, float* to) { *to = numbers[0] / numbers[1]; }

// ---- kernels that break them ----------------------------------------------------------------------------------------

__global__ void reverse_without_barrier(const int* from, int* to) {
  __shared__ int staged[kThreads];
  staged[threadIdx.x] = from[threadIdx.x];
  to[threadIdx.x] = staged[blockDim.x - 1 - threadIdx.x];
}

/// A vote orders no memory.
__global__ void reverse_after_vote(const int* from, int* to) {
  __shared__ int staged[32];
  staged[threadIdx.x] = from[threadIdx.x];
  __ballot_sync(0xFFFFFFFFU, 1);
  to[threadIdx.x] = staged[31 - threadIdx.x];
}

/// Warps are ordered by nothing less than __syncthreads().
__global__ void reverse_after_warp_barrier(const int* from, int* to) {
  __shared__ int staged[kThreads];
  staged[threadIdx.x] = from[threadIdx.x];
  __syncwarp();
  to[threadIdx.x] = staged[blockDim.x - 1 - threadIdx.x];
}

__global__ void count_without_atomic(int* count) { *count += 1; }

__global__ void copy_poison(std::uint32_t* to) {
  __shared__ std::uint32_t words[4];
  __shared__ std::uint8_t bytes[3];
  if (threadIdx.x == 0) {
    for (unsigned at = 0; at < 4; ++at) {
      to[blockIdx.x * 5 + at] = words[at];
    }
    to[blockIdx.x * 5 + 4] = static_cast<std::uint32_t>(bytes[0] | bytes[1] << 8 | bytes[2] << 16);
  }
}

__global__ void write_beside(const int* at) {
  __shared__ int before[8];
  __shared__ int words[8];
  __shared__ int behind[8];
  before[threadIdx.x] = 0;
  behind[threadIdx.x] = 0;
  int* const place = words;
  place[*at] = 1;
}

constexpr unsigned kBranchLine = std::source_location::current().line() + 3;
__global__ void barrier_in_branch(unsigned threads) {
  if (threadIdx.x < threads) {
    __syncthreads();
  }
}

__global__ void one_of_two_barriers(unsigned threads) {
  if (threadIdx.x < threads) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void vote_in_branch(unsigned lanes) {
  if (threadIdx.x % 32 < lanes) {
    __ballot_sync(0xFFFFFFFFU, 1);
  }
}

__global__ void vote_or_barrier(unsigned lanes) {
  if (threadIdx.x % 32 < lanes) {
    __ballot_sync(0xFFFFFFFFU, 1);
  } else {
    __syncwarp();
  }
}

__global__ void vote_with_masks(unsigned lanes) { __ballot_sync(threadIdx.x < lanes ? 0xFFFFFFFFU : 0xFFFFU, 1); }

__global__ void vote_without_itself(unsigned mask) { __ballot_sync(mask, 1); }

/// One half of each warp waits for the warp, the other for the block.
__global__ void wait_for_each_other() {
  if (threadIdx.x % 32 < 16) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

__global__ void throw_number(int number) {
  if (threadIdx.x == 5) {
    throw number;
  }
  __syncthreads();
}

// ---- launches -------------------------------------------------------------------------------------------------------

cudaError_t launch_reverse(const int* from, int* to, dim3 blocks, dim3 threads, cudaStream_t on) {
  reverse<<<blocks, threads, 0, on>>>(from, to);
  return cudaGetLastError();
}

cudaError_t launch_store_sum(const Triple& triple, int* to, cudaStream_t on) {
  store_sum<<<1, 1, 0, on>>>(triple, to);
  return cudaGetLastError();
}

cudaError_t launch_multiply(long long* numbers, unsigned count, cudaStream_t on) {
  multiply<long long, (3 > 2 ? 7 : 0)><<<dim3(1), count, 0U, on>>>(numbers);  // <<<1, 1>>>(no) "launch"
  return cudaGetLastError();
}

cudaError_t launch_barrier_in_branch(unsigned threads, cudaStream_t on) {
  barrier_in_branch<<<2, kThreads, 0, on>>>(threads);
  return cudaGetLastError();
}

}  // namespace small_kernels
