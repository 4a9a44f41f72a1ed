// A block in two registers of 16 numbers, its quanta in one of 32. Bits are turned into planes and back, 8 planes at a
// time, by a byte permutation and GF(2) products with the unit matrix, which transpose 8 by 8 bits.
#if defined(__x86_64__)
// GCC 12's own header leaves operands undefined on purpose, and warns of it once they are inlined.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <array>
#include <cstring>

#include "csrc/codec/kernels.h"

namespace hydra::codec {

namespace avx512 {

#define HYDRA_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512bitalg,gfni,lzcnt,bmi,bmi2,popcnt"
#define HYDRA_INLINE [[gnu::always_inline, gnu::target(HYDRA_TARGET)]] inline
#define HYDRA_KERNEL [[gnu::target(HYDRA_TARGET)]]

namespace {

// ---- formats --------------------------------------------------------------------------------------------------------
template <NumberFormat F>
struct Half {
  using Type = std::uint16_t;
};
template <>
struct Half<NumberFormat::kFloat32> {
  using Type = float;
};

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

/// Numbers that the format has.
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

template <class T>
HYDRA_INLINE std::uint8_t* put(std::uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof value);
  return to + sizeof value;
}

template <class T>
HYDRA_INLINE T get(const std::uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// ---- planes ---------------------------------------------------------------------------------------------------------
struct Order {
  alignas(32) std::array<std::uint8_t, 32> reversed{};  // each eight bytes backwards
  alignas(32) std::array<std::uint8_t, 32> gathered{};  // byte g of all words of planes, from four groups of 8 planes
  alignas(32) std::array<std::uint8_t, 32> scattered{};

  constexpr Order() {
    for (unsigned i = 0; i < 32; ++i) {
      reversed[i] = static_cast<std::uint8_t>((i & 24U) | (7U - (i & 7U)));
    }
    for (unsigned group = 0; group < 4; ++group) {
      for (unsigned i = 0; i < 8; ++i) {
        gathered[4 * i + group] = static_cast<std::uint8_t>(8 * group + i);
        scattered[8 * group + 7 - i] = static_cast<std::uint8_t>(4 * i + group);
      }
    }
  }
};
constexpr Order kOrder;
constexpr long long kUnitMatrix = static_cast<long long>(0x8040201008040201ULL);

HYDRA_INLINE __m256i order(const std::array<std::uint8_t, 32>& bytes) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes.data()));
}

/// 32 bytes become 8 words: bit j of all bytes is word j.
HYDRA_INLINE __m256i planes_of(__m256i bytes) {
  const __m256i transposed = _mm256_gf2p8affine_epi64_epi8(_mm256_set1_epi64x(kUnitMatrix),
                                                           _mm256_permutexvar_epi8(order(kOrder.reversed), bytes), 0);
  return _mm256_permutexvar_epi8(order(kOrder.gathered), transposed);
}

/// The reverse, of the first `width` words in memory; the others count as 0.
HYDRA_INLINE __m256i bytes_of_planes(const std::uint8_t* from, int width) {
  const __m256i words = _mm256_maskz_loadu_epi32(static_cast<__mmask8>((1U << width) - 1U), from);
  return _mm256_gf2p8affine_epi64_epi8(_mm256_set1_epi64x(kUnitMatrix),
                                       _mm256_permutexvar_epi8(order(kOrder.scattered), words), 0);
}

HYDRA_INLINE std::uint8_t* put_planes(std::uint8_t* to, __m512i values, int width) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), planes_of(_mm512_cvtepi16_epi8(values)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32),
                      planes_of(_mm512_cvtepi16_epi8(_mm512_srli_epi16(values, 8))));
  return to + 4 * width;
}

HYDRA_INLINE __m512i get_planes(const std::uint8_t* from, int width) {
  const int low = width < 8 ? width : 8;
  const __m512i lower = _mm512_cvtepu8_epi16(bytes_of_planes(from, low));
  const __m512i upper = _mm512_cvtepu8_epi16(bytes_of_planes(from + 32, width - low));
  return _mm512_or_si512(lower, _mm512_slli_epi16(upper, 8));
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

HYDRA_INLINE long long eight_of(const std::uint8_t* from, int width) {
  return static_cast<long long>(_pdep_u64(get<std::uint64_t>(from), each_byte(width)));
}

/// In registers: a vector made of four stores would have to wait for them.
HYDRA_INLINE __m256i get_packed(const std::uint8_t* from, int width) {
  return _mm256_set_epi64x(eight_of(from + 3 * width, width), eight_of(from + 2 * width, width),
                           eight_of(from + width, width), eight_of(from, width));
}

// ---- a block --------------------------------------------------------------------------------------------------------
/// Of unsigned ones.
HYDRA_INLINE int least(__m512i values) {
  const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(values), _mm512_extracti64x4_epi64(values, 1));
  const __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return _mm_cvtsi128_si32(_mm_minpos_epu16(quarter)) & 0xFFFF;
}

struct Numbers {
  __m512 low;
  __m512 high;
};

HYDRA_INLINE std::uint32_t mask_of(__mmask16 low, __mmask16 high) {
  return static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16;
}

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
HYDRA_INLINE bool fits(const Quantizer& quantizer, __m512 x, __m512i quanta) {
  __mmask16 good = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(quantizer.limit), _CMP_LT_OQ);
  if constexpr (F == NumberFormat::kFloat32) {  // of a 16-bit format q * step is always near enough
    const __m512 back = _mm512_mul_ps(_mm512_cvtepi32_ps(quanta), _mm512_set1_ps(quantizer.step));
    good = _mm512_mask_cmp_ps_mask(good, _mm512_abs_ps(_mm512_sub_ps(x, back)), _mm512_set1_ps(quantizer.bound),
                                   _CMP_LE_OQ);
  }
  return good == 0xFFFF;
}

HYDRA_INLINE std::uint8_t* put_sparse(std::uint8_t* to, __m512i quanta, const Summary& summary, Tag tag) {
  __m512i values = _mm512_sub_epi16(_mm512_abs_epi16(quanta), _mm512_set1_epi16(1));
  if (tag.signs) {
    values = _mm512_add_epi16(values, values);
    values = _mm512_mask_add_epi16(values, summary.negative, values, _mm512_set1_epi16(1));
  }
  const int count = std::popcount(summary.nonzero);
  to = put(to, summary.nonzero);
  const __m256i lower = _mm256_maskz_compress_epi8(summary.nonzero, _mm512_cvtepi16_epi8(values));
  if (tag.width <= 8) {
    return put_packed(to, lower, count, tag.width);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), lower);
  const __m256i upper = _mm256_maskz_compress_epi8(summary.nonzero, _mm512_cvtepi16_epi8(_mm512_srli_epi16(values, 8)));
  return put_packed(to + count, upper, count, tag.width - 8);
}

HYDRA_INLINE std::uint8_t* put_signed(std::uint8_t* to, __m512i quanta, const Summary& summary, Tag tag) {
  put(to, summary.negative | summary.negative_zeros);
  return put_planes(to + (tag.signs ? 4 : 0), _mm512_abs_epi16(quanta), tag.width);
}

/// kSigned or kOffset, whichever the tag says, without a branch: which one it is cannot be predicted.
HYDRA_INLINE std::uint8_t* put_dense(std::uint8_t* to, __m512i quanta, const Summary& summary, Tag tag) {
  std::uint32_t offset = 0U - static_cast<std::uint32_t>(tag.mode == Mode::kOffset);
  asm("" : "+r"(offset));  // or the compiler finds the condition again, and jumps
  const std::uint32_t signs = summary.negative | summary.negative_zeros;
  const auto lowest = static_cast<std::uint16_t>(summary.lowest);
  put(to, (lowest & offset) | (signs & ~offset));
  to += (2U & offset) | ((tag.signs ? 4U : 0U) & ~offset);
  const __m512i base = _mm512_set1_epi16(static_cast<short>(lowest));
  return put_planes(to, _mm512_mask_sub_epi16(_mm512_abs_epi16(quanta), offset, quanta, base), tag.width);
}

template <NumberFormat F, Choice C>
HYDRA_KERNEL std::uint8_t* encode_as(const Quantizer& quantizer, const std::uint8_t* numbers, std::int64_t blocks,
                                     std::uint8_t* tags, std::uint8_t* payload) {
  constexpr std::int64_t kRawBytes = kBlockNumbers * static_cast<std::int64_t>(sizeof(typename Half<F>::Type));
  const __m512i negative_zero = _mm512_set1_epi32(static_cast<int>(0x80000000U));
  for (std::int64_t block = 0; block < blocks; ++block, numbers += kRawBytes) {
    const Numbers x{load<F>(numbers), load<F>(numbers + kRawBytes / 2)};
    const __m512i low = quanta_of(quantizer, x.low);
    const __m512i high = quanta_of(quantizer, x.high);
    if (!(fits<F>(quantizer, x.low, low) && fits<F>(quantizer, x.high, high))) [[unlikely]] {
      tags[block] = kRawTag;
      std::memcpy(payload, numbers, kRawBytes);
      payload += kRawBytes;
      continue;
    }
    const __m512i quanta =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
    Summary summary;
    summary.negative = _mm512_movepi16_mask(quanta);
    summary.negative_zeros = mask_of(_mm512_cmpeq_epi32_mask(_mm512_castps_si512(x.low), negative_zero),
                                     _mm512_cmpeq_epi32_mask(_mm512_castps_si512(x.high), negative_zero));
    Tag tag;
    if constexpr (C == Choice::kShortest) {
      const __m512i biased = _mm512_xor_si512(quanta, _mm512_set1_epi16(static_cast<short>(0x8000)));
      summary.nonzero = _mm512_test_epi16_mask(quanta, quanta);
      summary.lowest = least(biased) - 32768;
      summary.highest = 32767 - least(_mm512_xor_si512(biased, _mm512_set1_epi16(-1)));
      tag = shortest(summary);
    } else {
      const __m512i magnitudes = _mm512_abs_epi16(quanta);
      const __m256i half =
          _mm256_or_si256(_mm512_castsi512_si256(magnitudes), _mm512_extracti64x4_epi64(magnitudes, 1));
      const __m128i quarter = _mm_or_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
      const std::uint64_t eighth = static_cast<std::uint64_t>(_mm_cvtsi128_si64(quarter)) |
                                   static_cast<std::uint64_t>(_mm_extract_epi64(quarter, 1));
      const std::uint32_t word = static_cast<std::uint32_t>(eighth | eighth >> 32);
      summary.highest = static_cast<int>((word | word >> 16) & 0xFFFFU);  // as wide as the largest
      tag = signed_tag(summary);
    }
    tags[block] = tag.byte();
    if constexpr (C == Choice::kShortest) {
      payload = tag.mode == Mode::kSparse ? put_sparse(payload, quanta, summary, tag)
                                          : put_dense(payload, quanta, summary, tag);
    } else {
      payload = put_signed(payload, quanta, summary, tag);
    }
  }
  return payload;
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
  from += 4;
  __m256i lower;
  __m256i upper = _mm256_setzero_si256();
  if (tag.width <= 8) {
    lower = get_packed(from, tag.width);
    from += (count * tag.width + 7) / 8;
  } else {
    lower = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    from += count;
    upper = get_packed(from, tag.width - 8);
    from += (count * (tag.width - 8) + 7) / 8;
  }
  __m512i values =
      _mm512_or_si512(_mm512_cvtepu8_epi16(_mm256_maskz_expand_epi8(nonzero, lower)),
                      _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_maskz_expand_epi8(nonzero, upper)), 8));
  std::uint32_t signs = 0;
  if (tag.signs) {
    signs = _mm512_test_epi16_mask(values, _mm512_set1_epi16(1));
    values = _mm512_srli_epi16(values, 1);
  }
  return {_mm512_maskz_add_epi16(nonzero, values, _mm512_set1_epi16(1)), signs, from};
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
HYDRA_KERNEL Decoded decode_as(const Quantizer& quantizer, const std::uint8_t* tags, std::int64_t blocks,
                               const std::uint8_t* payload, const std::uint8_t* end, std::uint8_t* numbers) {
  constexpr std::int64_t kRawBytes = kBlockNumbers * static_cast<std::int64_t>(sizeof(typename Half<F>::Type));
  std::int64_t block = 0;
  for (; block < blocks && end - payload >= kSlackBytes; ++block, numbers += kRawBytes) {
    if (tags[block] == kRawTag) [[unlikely]] {
      std::memcpy(numbers, payload, kRawBytes);
      payload += kRawBytes;
      continue;
    }
    const Quanta found = get_block(payload, Tag::of(tags[block]));
    payload = found.payload;
    store<F>(numbers,
             numbers_of(_mm512_castsi512_si256(found.values), static_cast<__mmask16>(found.signs), quantizer.step));
    store<F>(numbers + kRawBytes / 2, numbers_of(_mm512_extracti64x4_epi64(found.values, 1),
                                                 static_cast<__mmask16>(found.signs >> 16), quantizer.step));
  }
  return {block, payload};
}

#include "csrc/codec/kernel_table.h"

}  // namespace

}  // namespace avx512

const Kernels kAvx512Kernels = avx512::kTable;

}  // namespace hydra::codec
#endif
