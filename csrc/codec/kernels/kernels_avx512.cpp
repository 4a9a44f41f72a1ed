// A block takes two registers of 16 numbers, and its quanta one register of 32. A byte permutation and GF(2) products
// with the unit matrix transpose 8 by 8 bits. They turn quanta into bit planes and back, 8 planes at a time.
#if defined(__x86_64__)
// GCC 12's own header leaves operands undefined on purpose, and GCC warns of them after inlining.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <array>
#include <cstring>

#include "csrc/codec/bytes.h"
#include "csrc/codec/kernels/kernels.h"

namespace hydra::codec {

namespace avx512 {

#define HYDRA_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512bitalg,gfni,lzcnt,bmi,bmi2,popcnt"
#define HYDRA_INLINE [[gnu::always_inline, gnu::target(HYDRA_TARGET)]] inline
#define HYDRA_KERNEL [[gnu::target(HYDRA_TARGET)]]

namespace {

// ---- formats --------------------------------------------------------------------------------------------------------
template <NumberFormat F>
constexpr std::int64_t kBlockBytes = kBlockNumbers * bytes_of(F);

/// The indices of the lower halves of the 32-bit numbers in two registers.
alignas(64) constexpr std::array<std::uint16_t, 32> kEven = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                             22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                             44, 46, 48, 50, 52, 54, 56, 58, 60, 62};

template <NumberFormat F>
HYDRA_INLINE __m512 load(const void* from) {
  if constexpr (F == NumberFormat::kFloat32) {
    return _mm512_loadu_ps(from);
  } else if constexpr (F == NumberFormat::kBfloat16) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from))), 16));
  } else {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  }
}

/// Stores numbers that the format can represent exactly.
template <NumberFormat F>
HYDRA_INLINE void store(void* to, __m512 numbers) {
  if constexpr (F == NumberFormat::kFloat32) {
    _mm512_storeu_ps(to, numbers);
  } else if constexpr (F == NumberFormat::kBfloat16) {
    _mm256_storeu_si256(static_cast<__m256i*>(to),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(numbers), 16)));
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(to),
                        _mm512_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

HYDRA_INLINE __m256i vector_at(const std::uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// ---- planes ---------------------------------------------------------------------------------------------------------
using Bytes64 = std::array<std::uint8_t, 64>;

/// Permutations of the bytes of a block's 32 quanta. Joined, byte `half` of number n is at 2 * n + half; apart, it is
/// at 32 * half + n. Planes lie as in a payload: byte g of word j is at 4 * j + g.
struct Order {
  alignas(64) Bytes64 apart{};
  alignas(64) Bytes64 joined{};
  alignas(64) Bytes64 reversed{};   // apart, with each eight reversed, as the product needs them
  alignas(64) Bytes64 gathered{};   // four groups of eight planes become words
  alignas(64) Bytes64 scattered{};  // words become groups

  constexpr Order() {
    for (unsigned half = 0; half < 2; ++half) {
      for (unsigned n = 0; n < 32; ++n) {
        const unsigned group = n / 8;
        const unsigned i = n % 8;
        apart[32 * half + n] = static_cast<std::uint8_t>(2 * n + half);
        joined[2 * n + half] = static_cast<std::uint8_t>(32 * half + n);
        reversed[32 * half + n] = static_cast<std::uint8_t>(2 * (8 * group + 7 - i) + half);
        gathered[32 * half + 4 * i + group] = static_cast<std::uint8_t>(32 * half + n);
        scattered[32 * half + 8 * group + 7 - i] = static_cast<std::uint8_t>(32 * half + 4 * i + group);
      }
    }
  }
};
constexpr Order kOrder;
constexpr long long kUnitMatrix = static_cast<long long>(0x8040201008040201ULL);

HYDRA_INLINE __m512i ordered(__m512i bytes, const Bytes64& order) {
  return _mm512_permutexvar_epi8(_mm512_load_si512(order.data()), bytes);
}

HYDRA_INLINE __m512i transposed(__m512i bytes) {
  return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(kUnitMatrix), bytes, 0);
}

HYDRA_INLINE std::uint8_t* put_planes(std::uint8_t* to, __m512i values, int width) {
  _mm512_storeu_si512(to, ordered(transposed(ordered(values, kOrder.reversed)), kOrder.gathered));
  return to + 4 * width;
}

HYDRA_INLINE __m512i get_planes(const std::uint8_t* from, int width) {
  const __m512i words = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << width) - 1U), from);
  return ordered(transposed(ordered(words, kOrder.scattered)), kOrder.joined);
}

// ---- packed bits ----------------------------------------------------------------------------------------------------
HYDRA_INLINE std::uint64_t each_byte(int width) { return 0x0101010101010101ULL * ((1U << width) - 1U); }

HYDRA_INLINE std::uint8_t* put_packed(std::uint8_t* to, __m256i bytes, int count, int width) {
  alignas(32) std::array<std::uint64_t, 4> eights;
  _mm256_store_si256(reinterpret_cast<__m256i*>(eights.data()), bytes);
  for (int i = 0; i < 4; ++i) {
    put(to + i * width, _pext_u64(eights[static_cast<unsigned>(i)], each_byte(width)));
  }
  return to + (count * width + 7) / 8;
}

/// For each width: the bytes that each eight values begin with, and the bits that each value begins at.
struct Unpacking {
  alignas(32) std::array<std::array<std::uint8_t, 32>, 9> bytes{};
  alignas(32) std::array<std::array<std::uint8_t, 32>, 9> shifts{};

  constexpr Unpacking() {
    for (unsigned width = 0; width < 9; ++width) {
      for (unsigned i = 0; i < 32; ++i) {
        bytes[width][i] = static_cast<std::uint8_t>((i / 8 * width + i % 8) % 32);
        shifts[width][i] = static_cast<std::uint8_t>(i % 8 * width);
      }
    }
  }
};
constexpr Unpacking kUnpacking;

/// Unpacks 32 values to bytes.
HYDRA_INLINE __m256i get_packed(const std::uint8_t* from, int width) {
  const auto* const bytes = kUnpacking.bytes[static_cast<unsigned>(width)].data();
  const auto* const shifts = kUnpacking.shifts[static_cast<unsigned>(width)].data();
  const __m256i eights = _mm256_permutexvar_epi8(vector_at(bytes), vector_at(from));
  const __m256i values = _mm256_multishift_epi64_epi8(vector_at(shifts), eights);
  return _mm256_and_si256(values, _mm256_set1_epi8(static_cast<char>((1U << width) - 1U)));
}

// ---- a block --------------------------------------------------------------------------------------------------------
/// The unsigned minimum of the values, in the lower half of the result.
HYDRA_INLINE int least(__m512i values) {
  const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(values), _mm512_extracti64x4_epi64(values, 1));
  const __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return _mm_cvtsi128_si32(_mm_minpos_epu16(quarter));
}

HYDRA_INLINE __m512i flipped(__m512i values, int bits) {
  return _mm512_xor_si512(values, _mm512_set1_epi16(static_cast<short>(bits)));
}

HYDRA_INLINE std::uint32_t mask_of(__mmask16 low, __mmask16 high) { return _mm512_kunpackw(high, low); }

HYDRA_INLINE __m512i quanta_of(const Quantizer& quantizer, __m512 x) {
  const __m512i quanta = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(quantizer.inverse)));
  if (!quantizer.keep_signs) {
    return quanta;
  }
  const __mmask16 lost =
      _mm512_mask_cmp_ps_mask(_mm512_testn_epi32_mask(quanta, quanta), x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  const __m512i sign = _mm512_or_si512(_mm512_srai_epi32(_mm512_castps_si512(x), 31), _mm512_set1_epi32(1));
  return _mm512_mask_mov_epi32(quanta, lost, sign);
}

template <NumberFormat F>
HYDRA_INLINE __mmask16 fits(const Quantizer& quantizer, __m512 x, __m512i quanta) {
  __mmask16 good = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(quantizer.limit), _CMP_LT_OQ);
  if constexpr (F == NumberFormat::kFloat32) {  // in 16-bit formats q * step always keeps the bound
    const __m512 back = _mm512_mul_ps(_mm512_cvtepi32_ps(quanta), _mm512_set1_ps(quantizer.step));
    good = _mm512_mask_cmp_ps_mask(good, _mm512_abs_ps(_mm512_sub_ps(x, back)), _mm512_set1_ps(quantizer.bound),
                                   _CMP_LE_OQ);
  }
  return good;
}

#include "csrc/codec/batch.h"

template <NumberFormat F, Choice C>
HYDRA_INLINE __m512i quantize(const Quantizer& quantizer, const std::uint8_t* numbers, Batch& batch, std::size_t i) {
  const __m512i negative_zero = _mm512_set1_epi32(static_cast<int>(0x80000000U));
  const __m512 x = load<F>(numbers);
  const __m512 y = load<F>(numbers + kBlockBytes<F> / 2);
  const __m512i low = quanta_of(quantizer, x);
  const __m512i high = quanta_of(quantizer, y);
  batch.fitting[i] = mask_of(fits<F>(quantizer, x, low), fits<F>(quantizer, y, high));
  batch.negative_zeros[i] = mask_of(_mm512_cmpeq_epi32_mask(_mm512_castps_si512(x), negative_zero),
                                    _mm512_cmpeq_epi32_mask(_mm512_castps_si512(y), negative_zero));
  const __m512i quanta = _mm512_permutex2var_epi16(low, _mm512_load_si512(kEven.data()), high);
  batch.negative[i] = _mm512_movepi16_mask(quanta);
  if constexpr (C == Choice::kShortest) {
    batch.nonzero[i] = _mm512_test_epi16_mask(quanta, quanta);
    batch.least[i] = least(flipped(quanta, 0x8000));
    batch.least_flipped[i] = least(flipped(quanta, 0x7FFF));
  } else {
    batch.least_flipped[i] = least(flipped(_mm512_abs_epi16(quanta), 0x7FFF));
  }
  return quanta;
}

HYDRA_INLINE std::uint8_t* put_sparse(std::uint8_t* to, __m512i quanta, const Batch& batch, std::size_t i, Tag tag) {
  __m512i values = _mm512_sub_epi16(_mm512_abs_epi16(quanta), _mm512_set1_epi16(1));
  if (tag.signs) {
    values = _mm512_add_epi16(values, values);
    values = _mm512_mask_add_epi16(values, batch.negative[i], values, _mm512_set1_epi16(1));
  }
  const __m512i bytes = ordered(values, kOrder.apart);
  const std::uint32_t nonzero = batch.nonzero[i];
  const int count = std::popcount(nonzero);
  to = put(to, nonzero);
  const __m256i lower = _mm256_maskz_compress_epi8(nonzero, _mm512_castsi512_si256(bytes));
  if (tag.width <= 8) {
    return put_packed(to, lower, count, tag.width);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), lower);
  const __m256i upper = _mm256_maskz_compress_epi8(nonzero, _mm512_extracti64x4_epi64(bytes, 1));
  return put_packed(to + count, upper, count, tag.width - 8);
}

/// Writes a kSigned or a kOffset block, without a branch: the mode is unpredictable.
HYDRA_INLINE std::uint8_t* put_dense(std::uint8_t* to, __m512i quanta, const Batch& batch, std::size_t i, Tag tag) {
  std::uint32_t offset = 0U - static_cast<std::uint32_t>(tag.mode == Mode::kOffset);
  asm("" : "+r"(offset));  // keeps the compiler from recognising the condition and branching on it
  const std::uint32_t signs = batch.negative[i] | batch.negative_zeros[i];
  const auto lowest = static_cast<std::uint16_t>(batch.lowest[i]);
  put(to, (lowest & offset) | (signs & ~offset));
  to += (2U & offset) | ((tag.signs ? 4U : 0U) & ~offset);
  const __m512i base = _mm512_set1_epi16(static_cast<short>(lowest));
  return put_planes(to, _mm512_mask_sub_epi16(_mm512_abs_epi16(quanta), offset, quanta, base), tag.width);
}

HYDRA_INLINE std::uint8_t* put_block(std::uint8_t* to, __m512i quanta, const Batch& batch, std::size_t i, Tag tag) {
  return tag.mode == Mode::kSparse ? put_sparse(to, quanta, batch, i, tag) : put_dense(to, quanta, batch, i, tag);
}

HYDRA_INLINE std::uint8_t* put_signed(std::uint8_t* to, __m512i quanta, std::uint32_t signs, Tag tag) {
  put(to, signs);
  return put_planes(to + (tag.signs ? 4 : 0), _mm512_abs_epi16(quanta), tag.width);
}

// ---- back -----------------------------------------------------------------------------------------------------------
struct Quanta {
  __m512i values;
  std::uint32_t signs = 0;
  const std::uint8_t* payload = nullptr;
};

HYDRA_INLINE Quanta get_sparse(const std::uint8_t* from, Tag tag) {
  const auto nonzero = get<std::uint32_t>(from);
  const int count = std::popcount(nonzero);
  const int low = tag.width < 8 ? tag.width : 8;
  const std::uint8_t* const upper_begin = from + 4 + packed_bytes(count, low);
  const std::uint8_t* const end = upper_begin + packed_bytes(count, tag.width - low);
  const __m256i lower = get_packed(from + 4, low);
  __m512i values = _mm512_cvtepu8_epi16(_mm256_maskz_expand_epi8(nonzero, lower));
  if (tag.width > 8) {
    const __m256i upper = _mm256_maskz_expand_epi8(nonzero, get_packed(upper_begin, tag.width - 8));
    values = _mm512_or_si512(values, _mm512_slli_epi16(_mm512_cvtepu8_epi16(upper), 8));
  }
  std::uint32_t signs = 0;
  if (tag.signs) {
    signs = _mm512_test_epi16_mask(values, _mm512_set1_epi16(1));
    values = _mm512_srli_epi16(values, 1);
  }
  return {_mm512_maskz_add_epi16(nonzero, values, _mm512_set1_epi16(1)), signs, end};
}

HYDRA_INLINE Quanta get_block(const std::uint8_t* from, Tag tag) {
  if (tag.mode == Mode::kSparse) {
    return get_sparse(from, tag);
  }
  const auto first = get<std::uint32_t>(from);
  const bool offset = tag.mode == Mode::kOffset;
  from += offset ? 2 : tag.signs ? 4 : 0;
  const __m512i base = _mm512_set1_epi16(offset ? static_cast<short>(first & 0xFFFFU) : short{0});
  return {_mm512_add_epi16(get_planes(from, tag.width), base), tag.signs ? first : 0, from + 4 * tag.width};
}

HYDRA_INLINE __m512 numbers_of(__m256i quanta, __mmask16 signs, float step) {
  const __m512 numbers = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(quanta)), _mm512_set1_ps(step));
  const __m512i bits = _mm512_castps_si512(numbers);
  return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, signs, bits, _mm512_set1_epi32(static_cast<int>(0x80000000U))));
}

template <NumberFormat F>
HYDRA_KERNEL Decoded decode_as(Quantizer quantizer, const std::uint8_t* tags, std::int64_t blocks,
                               const std::uint8_t* payload, const std::uint8_t* end, std::uint8_t* numbers) {
  std::int64_t block = 0;
  for (; block < blocks && end - payload >= kSlackBytes; ++block, numbers += kBlockBytes<F>) {
    if (tags[block] == kRawTag) [[unlikely]] {
      std::memcpy(numbers, payload, kBlockBytes<F>);
      payload += kBlockBytes<F>;
      continue;
    }
    const Quanta found = get_block(payload, Tag::of(tags[block]));
    payload = found.payload;
    store<F>(numbers,
             numbers_of(_mm512_castsi512_si256(found.values), static_cast<__mmask16>(found.signs), quantizer.step));
    store<F>(numbers + kBlockBytes<F> / 2, numbers_of(_mm512_extracti64x4_epi64(found.values, 1),
                                                      static_cast<__mmask16>(found.signs >> 16), quantizer.step));
  }
  return {block, payload};
}

using BlockQuanta = __m512i;

#include "csrc/codec/kernels/kernel_frame.h"

}  // namespace

}  // namespace avx512

const Kernels kAvx512Kernels = avx512::kTable;

}  // namespace hydra::codec
#endif
