// A block takes four registers of 8 numbers, and its quanta two registers of 16.
//
// Encoding makes bit planes from the sign mask of bytes, which are doubled from plane to plane. Decoding transposes
// 8 by 8 bits in three exchanges. Words assembled in general registers are stored from there: a vector load waits for
// all recent stores to its address.
#if defined(__x86_64__)
#include <immintrin.h>

#include <array>
#include <cstring>

#include "csrc/codec/bytes.h"
#include "csrc/codec/kernels/kernels.h"

namespace hydra::codec {

namespace avx2 {

#define HYDRA_TARGET "avx2,f16c,lzcnt,bmi,bmi2,popcnt"
#define HYDRA_INLINE [[gnu::always_inline, gnu::target(HYDRA_TARGET)]] inline
#define HYDRA_KERNEL [[gnu::target(HYDRA_TARGET)]]

namespace {

// ---- formats --------------------------------------------------------------------------------------------------------
constexpr std::int64_t bytes_of_eight(NumberFormat format) { return 8 * bytes_of(format); }

template <NumberFormat F>
constexpr std::int64_t kBlockBytes = kBlockNumbers * bytes_of(F);

template <NumberFormat F>
HYDRA_INLINE __m256 load(const std::uint8_t* from) {
  if constexpr (F == NumberFormat::kFloat32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (F == NumberFormat::kBfloat16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  } else {
    return _mm256_cvtph_ps(halves);
  }
}

/// Stores numbers that the format can represent exactly.
template <NumberFormat F>
HYDRA_INLINE void store(std::uint8_t* to, __m256 numbers) {
  if constexpr (F == NumberFormat::kFloat32) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to), numbers);
  } else if constexpr (F == NumberFormat::kBfloat16) {
    const __m256i words = _mm256_srli_epi32(_mm256_castps_si256(numbers), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT));
  }
}

HYDRA_INLINE __m256i vector_at(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
HYDRA_INLINE void store_at(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

// ---- quanta ---------------------------------------------------------------------------------------------------------
/// 32 quanta of 16 bits, in the order that packing four registers gives: fours of the first half of each, then of the
/// second.
struct BlockQuanta {
  __m256i low;
  __m256i high;
};

/// Restores the order of bytes that were packed once more.
HYDRA_INLINE __m256i in_order(__m256i bytes) {
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/// Narrows values below 256 to bytes.
HYDRA_INLINE __m256i only_bytes(BlockQuanta values) { return in_order(_mm256_packus_epi16(values.low, values.high)); }

HYDRA_INLINE __m256i lower_bytes(BlockQuanta values) {
  const __m256i byte = _mm256_set1_epi16(0xFF);
  return only_bytes({_mm256_and_si256(values.low, byte), _mm256_and_si256(values.high, byte)});
}

HYDRA_INLINE __m256i upper_bytes(BlockQuanta values) {
  return only_bytes({_mm256_srli_epi16(values.low, 8), _mm256_srli_epi16(values.high, 8)});
}

HYDRA_INLINE BlockQuanta magnitudes_of(BlockQuanta quanta) {
  return {_mm256_abs_epi16(quanta.low), _mm256_abs_epi16(quanta.high)};
}

HYDRA_INLINE BlockQuanta differences(BlockQuanta values, __m256i subtrahend) {
  return {_mm256_sub_epi16(values.low, subtrahend), _mm256_sub_epi16(values.high, subtrahend)};
}

/// A mask with a bit for each negative value.
HYDRA_INLINE std::uint32_t mask_of(BlockQuanta values) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(in_order(_mm256_packs_epi16(values.low, values.high))));
}

/// The unsigned minimum of the values XOR `flip`, in the lower half of the result.
HYDRA_INLINE int least(__m256i values, int flip) {
  const __m256i flipped = _mm256_xor_si256(values, _mm256_set1_epi16(static_cast<short>(flip)));
  return _mm_cvtsi128_si32(
      _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(flipped), _mm256_extracti128_si256(flipped, 1))));
}

/// 32 quanta of 16 bits, in the order of their numbers.
struct Quanta {
  __m256i low;
  __m256i high;
};

HYDRA_INLINE Quanta widened(__m256i bytes) {
  return {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)),
          _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes, 1))};
}

HYDRA_INLINE Quanta joined(__m256i lower, __m256i upper) {
  const Quanta low = widened(lower);
  const Quanta high = widened(upper);
  return {_mm256_or_si256(low.low, _mm256_slli_epi16(high.low, 8)),
          _mm256_or_si256(low.high, _mm256_slli_epi16(high.high, 8))};
}

// ---- planes ---------------------------------------------------------------------------------------------------------
HYDRA_INLINE void put_eight_planes(std::uint8_t* to, __m256i bytes) {
  for (int plane = 7; plane >= 0; --plane) {
    put(to + 4 * plane, _mm256_movemask_epi8(bytes));
    bytes = _mm256_add_epi8(bytes, bytes);
  }
}

HYDRA_INLINE std::uint8_t* put_planes(std::uint8_t* to, BlockQuanta values, int width) {
  if (width <= 8) {
    put_eight_planes(to, only_bytes(values));
  } else {
    put_eight_planes(to, lower_bytes(values));
    put_eight_planes(to + 32, upper_bytes(values));
  }
  return to + 4 * width;
}

constexpr std::array<std::uint32_t, 16> kMasks = {~0U, ~0U, ~0U, ~0U, ~0U, ~0U, ~0U, ~0U, 0, 0, 0, 0, 0, 0, 0, 0};

/// Turns the bits of `width` words into bytes: bit j is from word j.
HYDRA_INLINE __m256i get_eight_planes(const std::uint8_t* from, int width) {
  __m256i bits = _mm256_and_si256(vector_at(from), vector_at(kMasks.data() + 8 - width));
  // The g-th quadword gets byte g of all eight words.
  bits = _mm256_shuffle_epi8(bits, _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12,
                                                    1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  bits = _mm256_permutevar8x32_epi32(bits, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const auto exchange = [&](int distance, long long mask) __attribute__((always_inline, target(HYDRA_TARGET))) {
    const __m256i moved =
        _mm256_and_si256(_mm256_xor_si256(bits, _mm256_srli_epi64(bits, distance)), _mm256_set1_epi64x(mask));
    bits = _mm256_xor_si256(bits, _mm256_xor_si256(moved, _mm256_slli_epi64(moved, distance)));
  };
  exchange(7, 0x00AA00AA00AA00AALL);
  exchange(14, 0x0000CCCC0000CCCCLL);
  exchange(28, 0x00000000F0F0F0F0LL);
  return bits;
}

HYDRA_INLINE Quanta get_planes(const std::uint8_t* from, int width) {
  if (width <= 8) {
    return widened(get_eight_planes(from, width));
  }
  return joined(get_eight_planes(from, 8), get_eight_planes(from + 32, width - 8));
}

// ---- packed bits ----------------------------------------------------------------------------------------------------
constexpr std::uint64_t kEachByte = 0x0101010101010101ULL;

/// A mask of the lowest `width` bits in the bytes of non-zero numbers, for the eight numbers `eight`.
HYDRA_INLINE std::uint64_t places_of(std::uint32_t nonzero, int eight, int width) {
  return _pdep_u64(nonzero >> (8 * eight) & 0xFFU, kEachByte) * ((1U << width) - 1U);
}

/// At most 7 bits stay pending, and eight values of 8 bits leave none: 64 bits are always enough.
HYDRA_INLINE std::uint8_t* put_packed(std::uint8_t* to, __m256i bytes, std::uint32_t nonzero, int width) {
  alignas(32) std::array<std::uint64_t, 4> eights;
  store_at(eights.data(), bytes);
  std::uint64_t pending = 0;
  int bits = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint64_t places = places_of(nonzero, i, width);
    pending |= _pext_u64(eights[static_cast<unsigned>(i)], places) << bits;
    put(to, pending);
    bits += std::popcount(places);
    to += bits / 8;
    pending = bits == 64 ? 0 : pending >> (bits & 56);
    bits &= 7;
  }
  return to + (bits != 0 ? 1 : 0);
}

/// Puts the packed values at the places of their numbers, with zeros between them.
HYDRA_INLINE __m256i get_packed(const std::uint8_t* from, std::uint32_t nonzero, int width) {
  std::array<long long, 4> eights;
  int bit = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint64_t places = places_of(nonzero, i, width);
    eights[static_cast<unsigned>(i)] =
        static_cast<long long>(_pdep_u64(get<std::uint64_t>(from + bit / 8) >> (bit % 8), places));
    bit += std::popcount(places);
  }
  return _mm256_set_epi64x(eights[3], eights[2], eights[1], eights[0]);
}

// ---- a block --------------------------------------------------------------------------------------------------------
#include "csrc/codec/batch.h"

HYDRA_INLINE __m256i quanta_of(const Quantizer& quantizer, __m256 x) {
  const __m256i quanta = _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(quantizer.inverse)));
  if (!quantizer.keep_signs) {
    return quanta;
  }
  const __m256i zero = _mm256_setzero_si256();
  const __m256i lost = _mm256_and_si256(_mm256_cmpeq_epi32(quanta, zero),
                                        _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
  const __m256i sign = _mm256_or_si256(_mm256_srai_epi32(_mm256_castps_si256(x), 31), _mm256_set1_epi32(1));
  return _mm256_blendv_epi8(quanta, sign, lost);
}

HYDRA_INLINE __m256i magnitude(__m256 x) {
  return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
}

/// A mask of the patterns above that of `number`, minus `less`. Patterns of positive floats have the order of the
/// floats, with NaN last.
HYDRA_INLINE __m256i beyond(__m256i patterns, float number, int less) {
  return _mm256_cmpgt_epi32(patterns, _mm256_set1_epi32(std::bit_cast<std::int32_t>(number) - less));
}

template <NumberFormat F>
HYDRA_INLINE std::uint32_t negative_zeros(const std::uint8_t* numbers) {
  std::uint32_t zeros = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const __m256i x = _mm256_castps_si256(load<F>(numbers + i * bytes_of_eight(F)));
    const __m256i equal = _mm256_cmpeq_epi32(x, _mm256_set1_epi32(static_cast<int>(0x80000000U)));
    zeros |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal))) << (8 * i);
  }
  return zeros;
}

template <NumberFormat F, Choice C>
HYDRA_INLINE BlockQuanta quantize(const Quantizer& quantizer, const std::uint8_t* numbers, Batch& batch,
                                  std::size_t i) {
  __m256i eights[4];
  __m256i largest = _mm256_setzero_si256();
  __m256i furthest = _mm256_setzero_si256();
  __m256i lowest = _mm256_setzero_si256();  // the lowest pattern; none is below that of -0.0
  for (int eight = 0; eight < 4; ++eight) {
    const __m256 x = load<F>(numbers + eight * bytes_of_eight(F));
    const __m256i quanta = quanta_of(quantizer, x);
    eights[eight] = quanta;
    largest = _mm256_max_epi32(largest, magnitude(x));
    lowest = _mm256_min_epi32(lowest, _mm256_castps_si256(x));
    if constexpr (F == NumberFormat::kFloat32) {  // in 16-bit formats q * step always keeps the bound
      const __m256 back = _mm256_mul_ps(_mm256_cvtepi32_ps(quanta), _mm256_set1_ps(quantizer.step));
      furthest = _mm256_max_epi32(furthest, magnitude(_mm256_sub_ps(x, back)));
    }
  }
  const __m256i bad = _mm256_or_si256(beyond(largest, quantizer.limit, 1), beyond(furthest, quantizer.bound, 0));
  batch.fitting[i] = _mm256_testz_si256(bad, bad) != 0 ? ~0U : 0;
  const __m256i zeros = _mm256_cmpeq_epi32(lowest, _mm256_set1_epi32(static_cast<int>(0x80000000U)));
  batch.negative_zeros[i] = _mm256_testz_si256(zeros, zeros) != 0 ? 0 : negative_zeros<F>(numbers);
  const BlockQuanta quanta{_mm256_packs_epi32(eights[0], eights[1]), _mm256_packs_epi32(eights[2], eights[3])};
  batch.negative[i] = mask_of(quanta);
  if constexpr (C == Choice::kShortest) {
    const __m256i zero = _mm256_setzero_si256();
    batch.nonzero[i] = ~mask_of({_mm256_cmpeq_epi16(quanta.low, zero), _mm256_cmpeq_epi16(quanta.high, zero)});
    batch.least[i] = least(_mm256_min_epi16(quanta.low, quanta.high), 0x8000);
    batch.least_flipped[i] = least(_mm256_max_epi16(quanta.low, quanta.high), 0x7FFF);
  } else {
    const BlockQuanta magnitudes = magnitudes_of(quanta);
    batch.least_flipped[i] = least(_mm256_max_epi16(magnitudes.low, magnitudes.high), 0x7FFF);
  }
  return quanta;
}

HYDRA_INLINE std::uint8_t* put_sparse(std::uint8_t* to, BlockQuanta quanta, std::uint32_t nonzero, Tag tag) {
  BlockQuanta values = differences(magnitudes_of(quanta), _mm256_set1_epi16(1));
  if (tag.signs) {
    values = {_mm256_add_epi16(_mm256_add_epi16(values.low, values.low), _mm256_srli_epi16(quanta.low, 15)),
              _mm256_add_epi16(_mm256_add_epi16(values.high, values.high), _mm256_srli_epi16(quanta.high, 15))};
  }
  to = put_packed(put(to, nonzero), lower_bytes(values), nonzero, tag.width < 8 ? tag.width : 8);
  return tag.width > 8 ? put_packed(to, upper_bytes(values), nonzero, tag.width - 8) : to;
}

HYDRA_INLINE std::uint8_t* put_signed(std::uint8_t* to, BlockQuanta quanta, std::uint32_t signs, Tag tag) {
  put(to, signs);
  return put_planes(to + (tag.signs ? 4 : 0), magnitudes_of(quanta), tag.width);
}

HYDRA_INLINE std::uint8_t* put_block(std::uint8_t* to, BlockQuanta quanta, const Batch& batch, std::size_t i, Tag tag) {
  if (tag.mode == Mode::kSparse) {
    return put_sparse(to, quanta, batch.nonzero[i], tag);
  }
  if (tag.mode == Mode::kOffset) {
    to = put(to, static_cast<std::int16_t>(batch.lowest[i]));
    return put_planes(to, differences(quanta, _mm256_set1_epi16(static_cast<short>(batch.lowest[i]))), tag.width);
  }
  return put_signed(to, quanta, batch.negative[i] | batch.negative_zeros[i], tag);
}

// ---- back -----------------------------------------------------------------------------------------------------------
struct Restored {
  Quanta quanta;
  std::uint32_t signs = 0;
  const std::uint8_t* payload = nullptr;
};

/// `there` has all ones where a value is.
HYDRA_INLINE __m256i quanta_of_values(__m256i values, __m256i there, bool signs) {
  if (!signs) {
    return _mm256_sub_epi16(values, there);
  }
  const __m256i negative = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_and_si256(values, _mm256_set1_epi16(1)));
  const __m256i magnitudes = _mm256_sub_epi16(_mm256_srli_epi16(values, 1), there);
  return _mm256_sub_epi16(_mm256_xor_si256(magnitudes, negative), negative);
}

/// Expands a mask to bytes: all ones where the bit is set.
HYDRA_INLINE __m256i bytes_of_mask(std::uint32_t mask) {
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(mask)),
                                            _mm256_set_epi64x(3 * kEachByte, 2 * kEachByte, kEachByte, 0));
  const __m256i bits = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ULL));
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
}

HYDRA_INLINE Restored get_sparse(const std::uint8_t* from, Tag tag) {
  const auto nonzero = get<std::uint32_t>(from);
  const int count = std::popcount(nonzero);
  const int low = tag.width < 8 ? tag.width : 8;
  const std::uint8_t* const upper_begin = from + 4 + packed_bytes(count, low);
  const __m256i lower = get_packed(from + 4, nonzero, low);
  const Quanta values =
      tag.width <= 8 ? widened(lower) : joined(lower, get_packed(upper_begin, nonzero, tag.width - 8));
  const __m256i there = bytes_of_mask(nonzero);
  const __m256i there_low = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(there));
  const __m256i there_high = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(there, 1));
  return {{quanta_of_values(values.low, there_low, tag.signs), quanta_of_values(values.high, there_high, tag.signs)},
          0,
          upper_begin + packed_bytes(count, tag.width - low)};
}

HYDRA_INLINE Restored get_block(const std::uint8_t* from, Tag tag) {
  if (tag.mode == Mode::kSparse) {
    return get_sparse(from, tag);
  }
  const auto first = get<std::uint32_t>(from);
  const bool offset = tag.mode == Mode::kOffset;
  from += offset ? 2 : tag.signs ? 4 : 0;
  Quanta quanta = get_planes(from, tag.width);
  if (offset) {
    const __m256i base = _mm256_set1_epi16(static_cast<short>(first & 0xFFFFU));
    quanta = {_mm256_add_epi16(quanta.low, base), _mm256_add_epi16(quanta.high, base)};
  }
  return {quanta, tag.signs ? first : 0, from + 4 * tag.width};
}

template <NumberFormat F>
HYDRA_INLINE void store_eight(std::uint8_t* to, __m128i quanta, std::uint32_t signs, float step) {
  const __m256 numbers = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(quanta)), _mm256_set1_ps(step));
  const __m256i places = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256i moved = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(signs)), places);
  const __m256i sign = _mm256_and_si256(moved, _mm256_set1_epi32(static_cast<int>(0x80000000U)));
  store<F>(to, _mm256_or_ps(numbers, _mm256_castsi256_ps(sign)));
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
    const Restored found = get_block(payload, Tag::of(tags[block]));
    payload = found.payload;
    const __m128i eights[] = {_mm256_castsi256_si128(found.quanta.low), _mm256_extracti128_si256(found.quanta.low, 1),
                              _mm256_castsi256_si128(found.quanta.high),
                              _mm256_extracti128_si256(found.quanta.high, 1)};
    for (int i = 0; i < 4; ++i) {
      store_eight<F>(numbers + i * bytes_of_eight(F), eights[i], found.signs >> (8 * i), quantizer.step);
    }
  }
  return {block, payload};
}

#include "csrc/codec/kernels/kernel_frame.h"

}  // namespace

}  // namespace avx2

const Kernels kAvx2Kernels = avx2::kTable;

}  // namespace hydra::codec
#endif
