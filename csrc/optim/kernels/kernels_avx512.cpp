// Sixteen numbers at a time in one register.
#if defined(__x86_64__)
// GCC 12's own header leaves operands undefined on purpose, and GCC warns of them after inlining.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>
#include <variant>

#include "csrc/optim/kernels/kernels.h"

namespace hydra {

namespace avx512 {

#define HYDRA_TARGET "avx512f,avx512bw,avx512dq,avx512vl"
#define HYDRA_INLINE [[gnu::always_inline, gnu::target(HYDRA_TARGET)]] inline
#define HYDRA_KERNEL [[gnu::target(HYDRA_TARGET)]] static

namespace {

HYDRA_INLINE __m512i all(std::uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

/// The bits, with every NaN made quiet and without payload.
HYDRA_INLINE __m512i quiet_bits(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  // In lanes with NaN: the sign of `bits`, the rest of a quiet NaN.
  return _mm512_mask_or_epi32(bits, nan, _mm512_and_si512(bits, all(0x80000000U)), all(0x7FC00000U));
}

HYDRA_INLINE __m512i widen(const void* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}

/// Stores the upper halves of the words.
HYDRA_INLINE void store_upper(void* to, __m512i words) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
}

struct Vector {
  static constexpr std::int64_t kWidth = 16;
  using Float = __m512;
  using Bits = __m512i;

  HYDRA_INLINE static Float broadcast(float value) { return _mm512_set1_ps(value); }
  HYDRA_INLINE static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  HYDRA_INLINE static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  HYDRA_INLINE static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  HYDRA_INLINE static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  HYDRA_INLINE static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }

  HYDRA_INLINE static Float load(const float* from) { return _mm512_loadu_ps(from); }
  HYDRA_INLINE static void store(float* to, Float value) { _mm512_storeu_ps(to, value); }
  HYDRA_INLINE static Float load_bfloat16(const std::uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(widen(from), 16));
  }
  HYDRA_INLINE static Float load_float16(const std::uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  HYDRA_INLINE static __m256i float16_of(Float value) {
    return _mm512_cvtps_ph(_mm512_castsi512_ps(quiet_bits(value)), _MM_FROUND_TO_NEAREST_INT);
  }
  HYDRA_INLINE static void store_float16(std::uint16_t* to, Float value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), float16_of(value));
  }

  HYDRA_INLINE static Float to_bfloat16(Float value) {
    // The instruction of AVX512-BF16 would treat denormal numbers as zero.
    const __m512i bits = quiet_bits(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, all(0x7FFF)), odd);
    return _mm512_castsi512_ps(_mm512_and_si512(rounded, all(0xFFFF0000U)));
  }
  HYDRA_INLINE static Float to_float16(Float value) { return _mm512_cvtph_ps(float16_of(value)); }

  HYDRA_INLINE static void store_bfloat16_half_up(std::uint16_t* to, Float value) {
    store_upper(to, _mm512_add_epi32(quiet_bits(value), all(0x8000)));
  }
  HYDRA_INLINE static Float load_split(const std::uint16_t* upper, const std::int16_t* lower) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(widen(upper), 16), _mm512_cvtepi16_epi32(low)));
  }
  HYDRA_INLINE static void store_split(std::uint16_t* upper, std::int16_t* lower, Float value) {
    const __m512i bits = quiet_bits(value);
    store_upper(upper, _mm512_add_epi32(bits, all(0x8000)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower), _mm512_cvtepi32_epi16(bits));
  }

  HYDRA_INLINE static void store_bfloat16_random(std::uint16_t* to, Float value, Bits random) {
    const __m512i bits = quiet_bits(value);
    const __m512i infinity = all(0x7F800000U);
    const __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, infinity), infinity);
    store_upper(to, _mm512_mask_add_epi32(bits, finite, bits, random));
  }
  HYDRA_INLINE static Bits hash(std::uint32_t counter) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i mixed = _mm512_mullo_epi32(_mm512_add_epi32(all(counter), lanes), all(0x9E3779B1U));
    mixed = _mm512_mullo_epi32(_mm512_xor_si512(mixed, _mm512_srli_epi32(mixed, 15)), all(0x85EBCA77U));
    mixed = _mm512_mullo_epi32(_mm512_xor_si512(mixed, _mm512_srli_epi32(mixed, 13)), all(0xC2B2AE3DU));
    return _mm512_xor_si512(mixed, _mm512_srli_epi32(mixed, 16));
  }
  HYDRA_INLINE static Bits lower_half(Bits random) { return _mm512_and_si512(random, all(0xFFFF)); }
  HYDRA_INLINE static Bits upper_half(Bits random) { return _mm512_srli_epi32(random, 16); }
};

#include "csrc/optim/kernels/kernel_frame.h"

void update(const ParameterUpdate& what, std::int64_t begin, std::int64_t end, float scale) noexcept {
  kPortableKernels.update(what, run_vectors(what, begin, end, scale), end, scale);
}

struct Sums {
  __m512d lanes[4];
};

HYDRA_INLINE Sums load_sums(const double* from) {
  return {{_mm512_loadu_pd(from), _mm512_loadu_pd(from + 8), _mm512_loadu_pd(from + 16), _mm512_loadu_pd(from + 24)}};
}

HYDRA_INLINE void store_sums(double* to, const Sums& sums) {
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_pd(to + 8 * i, sums.lanes[i]);
  }
}

HYDRA_INLINE void add_sixteen(__m512d& low_sums, __m512d& high_sums, __m512 values) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(values));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1));
  low_sums = _mm512_add_pd(low_sums, _mm512_mul_pd(low, low));
  high_sums = _mm512_add_pd(high_sums, _mm512_mul_pd(high, high));
}

HYDRA_INLINE void add_row(Sums& sums, __m512 first, __m512 second) {
  add_sixteen(sums.lanes[0], sums.lanes[1], first);
  add_sixteen(sums.lanes[2], sums.lanes[3], second);
}

#include "csrc/optim/kernels/norm_frame.h"

}  // namespace

}  // namespace avx512

const Kernels kAvx512Kernels = {.update = &avx512::update, .add_squares = &avx512::add_squares};

}  // namespace hydra
#endif
