// A block in four registers of 8 numbers, its quanta in two of 16. Bits become planes by the sign mask of bytes that
// are doubled again and again, and bytes again by three exchanges of an 8 by 8 bit transposition.
#if defined(__x86_64__)
#include <immintrin.h>

#include <array>
#include <cstring>

#include "csrc/codec/kernels.h"

namespace hydra::codec {

namespace avx2 {

#define HYDRA_TARGET "avx2,f16c,lzcnt,bmi,bmi2,popcnt"
#define HYDRA_INLINE [[gnu::always_inline, gnu::target(HYDRA_TARGET)]] inline
#define HYDRA_KERNEL [[gnu::target(HYDRA_TARGET)]]

namespace {

// ---- formats --------------------------------------------------------------------------------------------------------
constexpr std::int64_t bytes_of_eight(NumberFormat format) { return 8 * bytes_of(format); }

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

/// Numbers that the format has.
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

HYDRA_INLINE __m256i vector_at(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
HYDRA_INLINE void store_at(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

// ---- quanta ---------------------------------------------------------------------------------------------------------
/// 32 of 16 bits, in their order.
struct Quanta {
  __m256i low;
  __m256i high;
};

HYDRA_INLINE __m256i packed(__m256i first, __m256i second) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xD8);
}

HYDRA_INLINE __m256i lower_bytes(Quanta values) {
  const __m256i byte = _mm256_set1_epi16(0xFF);
  const __m256i both = _mm256_packus_epi16(_mm256_and_si256(values.low, byte), _mm256_and_si256(values.high, byte));
  return _mm256_permute4x64_epi64(both, 0xD8);
}

HYDRA_INLINE __m256i upper_bytes(Quanta values) {
  const __m256i both = _mm256_packus_epi16(_mm256_srli_epi16(values.low, 8), _mm256_srli_epi16(values.high, 8));
  return _mm256_permute4x64_epi64(both, 0xD8);
}

HYDRA_INLINE Quanta quanta_of_bytes(__m256i lower, __m256i upper) {
  const auto wide = [](__m256i bytes) __attribute__((always_inline, target(HYDRA_TARGET))) {
    return Quanta{_mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)),
                  _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes, 1))};
  };
  const Quanta low = wide(lower);
  const Quanta high = wide(upper);
  return {_mm256_or_si256(low.low, _mm256_slli_epi16(high.low, 8)),
          _mm256_or_si256(low.high, _mm256_slli_epi16(high.high, 8))};
}

HYDRA_INLINE Quanta magnitudes_of(Quanta quanta) {
  return {_mm256_abs_epi16(quanta.low), _mm256_abs_epi16(quanta.high)};
}

/// A bit for each value whose mask is all ones.
HYDRA_INLINE std::uint32_t mask_of(Quanta masks) {
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(masks.low, masks.high), 0xD8);
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
}

HYDRA_INLINE __m128i least_of(__m256i values) {  // unsigned
  return _mm_min_epu16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
}

HYDRA_INLINE int least(__m256i values) { return _mm_cvtsi128_si32(_mm_minpos_epu16(least_of(values))) & 0xFFFF; }

// ---- planes ---------------------------------------------------------------------------------------------------------
HYDRA_INLINE void put_eight_planes(std::uint8_t* to, __m256i bytes) {
  std::array<std::uint32_t, 8> words;
  for (int plane = 7; plane >= 0; --plane) {
    words[static_cast<unsigned>(plane)] = static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
    bytes = _mm256_add_epi8(bytes, bytes);
  }
  std::memcpy(to, words.data(), sizeof words);
}

HYDRA_INLINE std::uint8_t* put_planes(std::uint8_t* to, Quanta values, int width) {
  put_eight_planes(to, lower_bytes(values));
  if (width > 8) {
    put_eight_planes(to + 32, upper_bytes(values));
  }
  return to + 4 * width;
}

constexpr std::array<std::uint32_t, 16> kMasks = {~0U, ~0U, ~0U, ~0U, ~0U, ~0U, ~0U, ~0U, 0, 0, 0, 0, 0, 0, 0, 0};

/// The bits of `width` words as bytes, bit j from word j.
HYDRA_INLINE __m256i get_eight_planes(const std::uint8_t* from, int width) {
  __m256i bits = _mm256_and_si256(vector_at(from), vector_at(kMasks.data() + 8 - width));
  // Byte g of all eight words side by side, in the g-th quadword.
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
  const __m256i lower = get_eight_planes(from, width < 8 ? width : 8);
  return quanta_of_bytes(lower, width > 8 ? get_eight_planes(from + 32, width - 8) : _mm256_setzero_si256());
}

// ---- a block --------------------------------------------------------------------------------------------------------
HYDRA_INLINE std::uint64_t each_byte(int width) { return 0x0101010101010101ULL * ((1U << width) - 1U); }

using Bytes32 = std::array<std::uint8_t, 32>;

HYDRA_INLINE std::uint8_t* put_packed(std::uint8_t* to, const Bytes32& bytes, int count, int width) {
  for (int i = 0; i < 4; ++i) {
    put(to + i * width, _pext_u64(get<std::uint64_t>(bytes.data() + 8 * i), each_byte(width)));
  }
  return to + (count * width + 7) / 8;
}

HYDRA_INLINE Bytes32 get_packed(const std::uint8_t* from, int width) {
  Bytes32 bytes;
  for (int i = 0; i < 4; ++i) {
    put(bytes.data() + 8 * i, _pdep_u64(get<std::uint64_t>(from + i * width), each_byte(width)));
  }
  return bytes;
}

HYDRA_INLINE std::uint8_t* put_sparse(std::uint8_t* to, Quanta quanta, const Summary& summary, Tag tag) {
  alignas(32) std::array<std::int16_t, 32> all;
  store_at(all.data(), quanta.low);
  store_at(all.data() + 16, quanta.high);
  Bytes32 lower{};
  Bytes32 upper{};
  unsigned count = 0;
  for (std::uint32_t left = summary.nonzero; left != 0; left &= left - 1) {
    const int quantum = all[static_cast<unsigned>(std::countr_zero(left))];
    const int less = (quantum < 0 ? -quantum : quantum) - 1;
    const int value = tag.signs ? 2 * less + static_cast<int>(quantum < 0) : less;
    lower[count] = static_cast<std::uint8_t>(value);
    upper[count++] = static_cast<std::uint8_t>(value >> 8);
  }
  to = put_packed(put(to, summary.nonzero), lower, static_cast<int>(count), tag.width < 8 ? tag.width : 8);
  return tag.width > 8 ? put_packed(to, upper, static_cast<int>(count), tag.width - 8) : to;
}

HYDRA_INLINE std::uint8_t* put_block(std::uint8_t* to, Quanta quanta, const Summary& summary, Tag tag) {
  if (tag.mode == Mode::kSparse) {
    return put_sparse(to, quanta, summary, tag);
  }
  if (tag.mode == Mode::kOffset) {
    const __m256i lowest = _mm256_set1_epi16(static_cast<short>(summary.lowest));
    to = put(to, static_cast<std::int16_t>(summary.lowest));
    return put_planes(to, {_mm256_sub_epi16(quanta.low, lowest), _mm256_sub_epi16(quanta.high, lowest)}, tag.width);
  }
  put(to, summary.negative | summary.negative_zeros);
  return put_planes(to + (tag.signs ? 4 : 0), magnitudes_of(quanta), tag.width);
}

HYDRA_INLINE __m256i quantize(const Quantizer& quantizer, __m256 x) {
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

HYDRA_INLINE __m256 magnitude(__m256 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF))); }

/// All ones where it does.
template <NumberFormat F>
HYDRA_INLINE __m256 fits(const Quantizer& quantizer, __m256 x, __m256i quanta) {
  __m256 good = _mm256_cmp_ps(magnitude(x), _mm256_set1_ps(quantizer.limit), _CMP_LT_OQ);
  if constexpr (F == NumberFormat::kFloat32) {  // of a 16-bit format q * step is always near enough
    const __m256 back = _mm256_mul_ps(_mm256_cvtepi32_ps(quanta), _mm256_set1_ps(quantizer.step));
    good = _mm256_and_ps(good,
                         _mm256_cmp_ps(magnitude(_mm256_sub_ps(x, back)), _mm256_set1_ps(quantizer.bound), _CMP_LE_OQ));
  }
  return good;
}

HYDRA_INLINE int widest(Quanta magnitudes) {
  const __m256i both = _mm256_or_si256(magnitudes.low, magnitudes.high);
  const __m128i half = _mm_or_si128(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const std::uint64_t quarter =
      static_cast<std::uint64_t>(_mm_cvtsi128_si64(half)) | static_cast<std::uint64_t>(_mm_extract_epi64(half, 1));
  const std::uint32_t word = static_cast<std::uint32_t>(quarter | quarter >> 32);
  return static_cast<int>((word | word >> 16) & 0xFFFFU);
}

HYDRA_INLINE void summarize(Quanta quanta, Summary& summary) {
  const __m256i sign = _mm256_set1_epi16(static_cast<short>(0x8000));
  const __m256i low = _mm256_xor_si256(quanta.low, sign);
  const __m256i high = _mm256_xor_si256(quanta.high, sign);
  const __m256i zero = _mm256_setzero_si256();
  summary.nonzero = ~mask_of({_mm256_cmpeq_epi16(quanta.low, zero), _mm256_cmpeq_epi16(quanta.high, zero)});
  summary.lowest = least(_mm256_min_epu16(low, high)) - 32768;
  summary.highest = 32767 - least(_mm256_xor_si256(_mm256_max_epu16(low, high), _mm256_set1_epi16(-1)));
}

template <NumberFormat F, Choice C>
HYDRA_KERNEL std::uint8_t* encode_as(const Quantizer& quantizer, const std::uint8_t* numbers, std::int64_t blocks,
                                     std::uint8_t* tags, std::uint8_t* payload) {
  constexpr std::int64_t kEight = bytes_of_eight(F);
  const __m256i negative_zero = _mm256_set1_epi32(static_cast<int>(0x80000000U));
  for (std::int64_t block = 0; block < blocks; ++block, numbers += 4 * kEight) {
    __m256i eights[4];
    __m256 good = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    Summary summary;
    for (unsigned i = 0; i < 4; ++i) {
      const __m256 x = load<F>(numbers + i * kEight);
      eights[i] = quantize(quantizer, x);
      good = _mm256_and_ps(good, fits<F>(quantizer, x, eights[i]));
      const __m256i zeros = _mm256_cmpeq_epi32(_mm256_castps_si256(x), negative_zero);
      summary.negative_zeros |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(zeros))) << (8 * i);
    }
    if (_mm256_movemask_ps(good) != 0xFF) [[unlikely]] {
      tags[block] = kRawTag;
      std::memcpy(payload, numbers, 4 * kEight);
      payload += 4 * kEight;
      continue;
    }
    const Quanta quanta{packed(eights[0], eights[1]), packed(eights[2], eights[3])};
    summary.negative = mask_of({_mm256_srai_epi16(quanta.low, 15), _mm256_srai_epi16(quanta.high, 15)});
    Tag tag;
    if constexpr (C == Choice::kShortest) {
      summarize(quanta, summary);
      tag = shortest(summary);
    } else {
      summary.highest = widest(magnitudes_of(quanta));  // as wide as the largest
      tag = signed_tag(summary);
    }
    tags[block] = tag.byte();
    payload = put_block(payload, quanta, summary, tag);
  }
  return payload;
}

// ---- back -----------------------------------------------------------------------------------------------------------
struct Restored {
  Quanta quanta;
  std::uint32_t signs = 0;
  const std::uint8_t* payload = nullptr;
};

HYDRA_INLINE Restored get_sparse(const std::uint8_t* from, Tag tag) {
  const auto nonzero = get<std::uint32_t>(from);
  const int count = std::popcount(nonzero);
  const int low = tag.width < 8 ? tag.width : 8;
  const std::uint8_t* at = from + 4;
  const Bytes32 lower = get_packed(at, low);
  at += (count * low + 7) / 8;
  Bytes32 upper{};
  if (tag.width > 8) {
    upper = get_packed(at, tag.width - 8);
    at += (count * (tag.width - 8) + 7) / 8;
  }
  alignas(32) std::array<std::int16_t, 32> all{};
  unsigned index = 0;
  for (std::uint32_t left = nonzero; left != 0; left &= left - 1, ++index) {
    const int value = lower[index] | upper[index] << 8;
    const int quantum = tag.signs ? ((value & 1) != 0 ? -1 - (value >> 1) : 1 + (value >> 1)) : 1 + value;
    all[static_cast<unsigned>(std::countr_zero(left))] = static_cast<std::int16_t>(quantum);
  }
  return {{vector_at(all.data()), vector_at(all.data() + 16)}, 0, at};
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
HYDRA_KERNEL Decoded decode_as(const Quantizer& quantizer, const std::uint8_t* tags, std::int64_t blocks,
                               const std::uint8_t* payload, const std::uint8_t* end, std::uint8_t* numbers) {
  constexpr std::int64_t kEight = bytes_of_eight(F);
  std::int64_t block = 0;
  for (; block < blocks && end - payload >= kSlackBytes; ++block, numbers += 4 * kEight) {
    if (tags[block] == kRawTag) [[unlikely]] {
      std::memcpy(numbers, payload, 4 * kEight);
      payload += 4 * kEight;
      continue;
    }
    const Restored found = get_block(payload, Tag::of(tags[block]));
    payload = found.payload;
    store_eight<F>(numbers, _mm256_castsi256_si128(found.quanta.low), found.signs, quantizer.step);
    store_eight<F>(numbers + kEight, _mm256_extracti128_si256(found.quanta.low, 1), found.signs >> 8, quantizer.step);
    store_eight<F>(numbers + 2 * kEight, _mm256_castsi256_si128(found.quanta.high), found.signs >> 16, quantizer.step);
    store_eight<F>(numbers + 3 * kEight, _mm256_extracti128_si256(found.quanta.high, 1), found.signs >> 24,
                   quantizer.step);
  }
  return {block, payload};
}

#include "csrc/codec/kernel_table.h"

}  // namespace

}  // namespace avx2

const Kernels kAvx2Kernels = avx2::kTable;

}  // namespace hydra::codec
#endif
