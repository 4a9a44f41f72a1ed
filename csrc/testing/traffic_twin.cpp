#include "csrc/testing/traffic_twin.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra::testing {

namespace {

using Loop = void (*)(void* const* arrays, std::int64_t begin, std::int64_t end);

// The traffic of all kinds of updates: fp32; fp32 master, bf16 gradient and copy; split; split with bf16 moments.
constexpr std::array kMixes = {
    Traffic{.update4 = 3, .read4 = 1},
    Traffic{.update4 = 3, .read2 = 1, .write2 = 1},
    Traffic{.update4 = 2, .update2 = 2, .read2 = 1},
    Traffic{.update2 = 4, .read2 = 1},
};

#if defined(__x86_64__)

// The elements of each array that a turn takes.
constexpr std::int64_t kStride = 32;

template <Traffic kTraffic>
[[gnu::target("avx512f")]] void loop512(void* const* arrays, std::int64_t begin, std::int64_t end) {
  constexpr int kUpdates = kTraffic.update4 + kTraffic.update2;
  constexpr int kReads = kTraffic.read4 + kTraffic.read2;
  const __m512i one = _mm512_set1_epi32(1);
  __m512i read = _mm512_setzero_si512();
  for (std::int64_t at = begin; at + kStride <= end; at += kStride) {
#pragma GCC unroll 8
    for (int i = 0; i < kUpdates + kReads + kTraffic.write2; ++i) {
      const bool wide = i < kTraffic.update4 || (i >= kUpdates && i < kUpdates + kTraffic.read4);
      auto* vector = static_cast<char*>(arrays[i]) + at * (wide ? 4 : 2);
      for (int part = 0; part < (wide ? 2 : 1); ++part, vector += 64) {
        if (i < kUpdates) {
          _mm512_storeu_si512(vector, _mm512_xor_si512(_mm512_loadu_si512(vector), one));
        } else if (i < kUpdates + kReads) {
          read = _mm512_xor_si512(read, _mm512_loadu_si512(vector));
        } else {
          _mm512_storeu_si512(vector, read);
        }
      }
    }
  }
  asm volatile("" : : "v"(read));  // keeps the compiler from dropping unused reads
}

template <Traffic kTraffic>
[[gnu::target("avx2")]] void loop256(void* const* arrays, std::int64_t begin, std::int64_t end) {
  constexpr int kUpdates = kTraffic.update4 + kTraffic.update2;
  constexpr int kReads = kTraffic.read4 + kTraffic.read2;
  const __m256i one = _mm256_set1_epi32(1);
  __m256i read = _mm256_setzero_si256();
  for (std::int64_t at = begin; at + kStride <= end; at += kStride) {
#pragma GCC unroll 8
    for (int i = 0; i < kUpdates + kReads + kTraffic.write2; ++i) {
      const bool wide = i < kTraffic.update4 || (i >= kUpdates && i < kUpdates + kTraffic.read4);
      auto* vector = reinterpret_cast<__m256i*>(static_cast<char*>(arrays[i]) + at * (wide ? 4 : 2));
      for (int part = 0; part < (wide ? 4 : 2); ++part, ++vector) {
        if (i < kUpdates) {
          _mm256_storeu_si256(vector, _mm256_xor_si256(_mm256_loadu_si256(vector), one));
        } else if (i < kUpdates + kReads) {
          read = _mm256_xor_si256(read, _mm256_loadu_si256(vector));
        } else {
          _mm256_storeu_si256(vector, read);
        }
      }
    }
  }
  asm volatile("" : : "x"(read));
}

template <std::size_t... kIndex>
Loop find(const Traffic& traffic, std::index_sequence<kIndex...>) {
  const bool wide = __builtin_cpu_supports("avx512f") != 0;
  Loop found = nullptr;
  ((traffic == kMixes[kIndex] ? void(found = wide ? &loop512<kMixes[kIndex]> : &loop256<kMixes[kIndex]>) : void()),
   ...);
  return wide || __builtin_cpu_supports("avx2") != 0 ? found : nullptr;
}

Loop find(const Traffic& traffic) { return find(traffic, std::make_index_sequence<kMixes.size()>()); }

#else

Loop find(const Traffic&) { return nullptr; }

#endif

}  // namespace

void run_traffic_twin(const Traffic& traffic, const std::vector<void*>& arrays, std::int64_t count, ThreadPool& pool) {
  constexpr std::int64_t kRange = 1 << 16;
  const Loop loop = find(traffic);
  HYDRA_EXPECT(loop != nullptr, StateError, "no update has such traffic, or this machine has no AVX2");
  const int needed = traffic.update4 + traffic.update2 + traffic.read4 + traffic.read2 + traffic.write2;
  HYDRA_EXPECT(static_cast<int>(arrays.size()) == needed, StateError,
               "the number of arrays is not that of the traffic");
  pool.parallel_for((count + kRange - 1) / kRange, [&](std::int64_t range) {
    loop(arrays.data(), range * kRange, std::min((range + 1) * kRange, count));
  });
}

}  // namespace hydra::testing
