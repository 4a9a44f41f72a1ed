// Sixteen numbers at a time in two registers: packing to 16 bits needs both, and reorders both at once. One test looks
// for NaN in all sixteen, and a rarely taken branch handles it.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <variant>

#include "csrc/optim/kernels/kernels.h"

namespace hydra {

namespace avx2 {

#define HYDRA_INLINE [[gnu::always_inline, gnu::target("avx2,f16c")]] inline
#define HYDRA_KERNEL [[gnu::target("avx2,f16c")]] static

namespace {

struct Floats {
  __m256 low;
  __m256 high;
};

struct Words {
  __m256i low;
  __m256i high;
};

HYDRA_INLINE Words bits_of(Floats value) { return {_mm256_castps_si256(value.low), _mm256_castps_si256(value.high)}; }
HYDRA_INLINE Floats floats_of(Words bits) { return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)}; }
HYDRA_INLINE __m256i all(std::uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }

HYDRA_INLINE __m256i quiet(__m256i bits) {
  const __m256i nan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, all(0x7FFFFFFFU)), all(0x7F800000U));
  const __m256i quieted = _mm256_or_si256(_mm256_and_si256(bits, all(0x80000000U)), all(0x7FC00000U));
  return _mm256_blendv_epi8(bits, quieted, nan);
}

/// The bits, with every NaN made quiet and without payload.
HYDRA_INLINE Words quiet_bits(Floats value) {
  Words bits = bits_of(value);
  if (_mm256_movemask_ps(_mm256_cmp_ps(value.low, value.high, _CMP_UNORD_Q)) != 0) [[unlikely]] {
    bits = {quiet(bits.low), quiet(bits.high)};
  }
  return bits;
}

/// Stores the upper halves of the words.
HYDRA_INLINE void store_upper(void* to, Words words) {
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(words.low, 16), _mm256_srli_epi32(words.high, 16));
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xD8));
}

HYDRA_INLINE void store_lower(void* to, Words words) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i packed =
      _mm256_packus_epi32(_mm256_blend_epi16(words.low, zero, 0xAA), _mm256_blend_epi16(words.high, zero, 0xAA));
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xD8));
}

HYDRA_INLINE __m128i load_eight(const void* from, int eighth) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from) + eighth);
}

HYDRA_INLINE __m256i nearest_even(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), all(1));
  return _mm256_and_si256(_mm256_add_epi32(_mm256_add_epi32(bits, all(0x7FFF)), odd), all(0xFFFF0000U));
}

HYDRA_INLINE __m256i mix(__m256i counter) {
  __m256i mixed = _mm256_mullo_epi32(counter, all(0x9E3779B1U));
  mixed = _mm256_mullo_epi32(_mm256_xor_si256(mixed, _mm256_srli_epi32(mixed, 15)), all(0x85EBCA77U));
  mixed = _mm256_mullo_epi32(_mm256_xor_si256(mixed, _mm256_srli_epi32(mixed, 13)), all(0xC2B2AE3DU));
  return _mm256_xor_si256(mixed, _mm256_srli_epi32(mixed, 16));
}

/// The random bits, or zero for numbers without a fraction to round.
HYDRA_INLINE __m256i only_finite(__m256i random, __m256i bits) {
  const __m256i infinity = all(0x7F800000U);
  return _mm256_andnot_si256(_mm256_cmpeq_epi32(_mm256_and_si256(bits, infinity), infinity), random);
}

struct Vector {
  static constexpr std::int64_t kWidth = 16;
  using Float = Floats;
  using Bits = Words;

  HYDRA_INLINE static Float broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  HYDRA_INLINE static Float add(Float a, Float b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  HYDRA_INLINE static Float sub(Float a, Float b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
  }
  HYDRA_INLINE static Float mul(Float a, Float b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  HYDRA_INLINE static Float div(Float a, Float b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
  }
  HYDRA_INLINE static Float sqrt(Float a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }

  HYDRA_INLINE static Float load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  HYDRA_INLINE static void store(float* to, Float value) {
    _mm256_storeu_ps(to, value.low);
    _mm256_storeu_ps(to + 8, value.high);
  }
  HYDRA_INLINE static Words load_upper(const void* from) {
    return {_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_eight(from, 0)), 16),
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_eight(from, 1)), 16)};
  }
  HYDRA_INLINE static Float load_bfloat16(const std::uint16_t* from) { return floats_of(load_upper(from)); }
  HYDRA_INLINE static Float load_float16(const std::uint16_t* from) {
    return {_mm256_cvtph_ps(load_eight(from, 0)), _mm256_cvtph_ps(load_eight(from, 1))};
  }
  HYDRA_INLINE static void store_float16(std::uint16_t* to, Float value) {
    const Float quieted = floats_of(quiet_bits(value));
    auto* eights = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(eights, _mm256_cvtps_ph(quieted.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(eights + 1, _mm256_cvtps_ph(quieted.high, _MM_FROUND_TO_NEAREST_INT));
  }

  HYDRA_INLINE static Float to_bfloat16(Float value) {
    const Words bits = quiet_bits(value);
    return floats_of({nearest_even(bits.low), nearest_even(bits.high)});
  }
  HYDRA_INLINE static Float to_float16(Float value) {
    const Float quieted = floats_of(quiet_bits(value));
    return {_mm256_cvtph_ps(_mm256_cvtps_ph(quieted.low, _MM_FROUND_TO_NEAREST_INT)),
            _mm256_cvtph_ps(_mm256_cvtps_ph(quieted.high, _MM_FROUND_TO_NEAREST_INT))};
  }

  HYDRA_INLINE static void store_bfloat16_half_up(std::uint16_t* to, Float value) {
    const Words bits = quiet_bits(value);
    store_upper(to, {_mm256_add_epi32(bits.low, all(0x8000)), _mm256_add_epi32(bits.high, all(0x8000))});
  }
  HYDRA_INLINE static Float load_split(const std::uint16_t* upper, const std::int16_t* lower) {
    const Words high = load_upper(upper);
    return floats_of({_mm256_add_epi32(high.low, _mm256_cvtepi16_epi32(load_eight(lower, 0))),
                      _mm256_add_epi32(high.high, _mm256_cvtepi16_epi32(load_eight(lower, 1)))});
  }
  HYDRA_INLINE static void store_split(std::uint16_t* upper, std::int16_t* lower, Float value) {
    const Words bits = quiet_bits(value);
    store_upper(upper, {_mm256_add_epi32(bits.low, all(0x8000)), _mm256_add_epi32(bits.high, all(0x8000))});
    store_lower(lower, bits);
  }

  HYDRA_INLINE static void store_bfloat16_random(std::uint16_t* to, Float value, Bits random) {
    Words bits = bits_of(value);
    // x - x is 0, or NaN where x is not finite.
    const __m256 low = _mm256_sub_ps(value.low, value.low);
    const __m256 high = _mm256_sub_ps(value.high, value.high);
    if (_mm256_movemask_ps(_mm256_cmp_ps(low, high, _CMP_UNORD_Q)) != 0) [[unlikely]] {
      bits = {quiet(bits.low), quiet(bits.high)};
      random = {only_finite(random.low, bits.low), only_finite(random.high, bits.high)};
    }
    store_upper(to, {_mm256_add_epi32(bits.low, random.low), _mm256_add_epi32(bits.high, random.high)});
  }
  HYDRA_INLINE static Bits hash(std::uint32_t counter) {
    const __m256i first = _mm256_add_epi32(all(counter), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return {mix(first), mix(_mm256_add_epi32(first, all(8)))};
  }
  HYDRA_INLINE static Bits lower_half(Bits random) {
    return {_mm256_and_si256(random.low, all(0xFFFF)), _mm256_and_si256(random.high, all(0xFFFF))};
  }
  HYDRA_INLINE static Bits upper_half(Bits random) {
    return {_mm256_srli_epi32(random.low, 16), _mm256_srli_epi32(random.high, 16)};
  }
};

#include "csrc/optim/kernels/kernel_frame.h"

void update(const ParameterUpdate& what, std::int64_t begin, std::int64_t end, float scale) noexcept {
  kPortableKernels.update(what, run_vectors(what, begin, end, scale), end, scale);
}

struct Sums {
  __m256d lanes[8];
};

HYDRA_INLINE Sums load_sums(const double* from) {
  Sums sums;
  for (int i = 0; i < 8; ++i) {
    sums.lanes[i] = _mm256_loadu_pd(from + 4 * i);
  }
  return sums;
}

HYDRA_INLINE void store_sums(double* to, const Sums& sums) {
  for (int i = 0; i < 8; ++i) {
    _mm256_storeu_pd(to + 4 * i, sums.lanes[i]);
  }
}

HYDRA_INLINE void add_eight(__m256d& low_sums, __m256d& high_sums, __m256 values) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
  low_sums = _mm256_add_pd(low_sums, _mm256_mul_pd(low, low));
  high_sums = _mm256_add_pd(high_sums, _mm256_mul_pd(high, high));
}

HYDRA_INLINE void add_row(Sums& sums, Floats first, Floats second) {
  add_eight(sums.lanes[0], sums.lanes[1], first.low);
  add_eight(sums.lanes[2], sums.lanes[3], first.high);
  add_eight(sums.lanes[4], sums.lanes[5], second.low);
  add_eight(sums.lanes[6], sums.lanes[7], second.high);
}

#include "csrc/optim/kernels/norm_frame.h"

}  // namespace

}  // namespace avx2

const Kernels kAvx2Kernels = {.update = &avx2::update, .add_squares = &avx2::add_squares};

}  // namespace hydra
#endif
