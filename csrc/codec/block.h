// The format of a block: 32 numbers, as a tag of one byte and a payload of up to 128 bytes.
//
// The tag gives the payload's length, except for sparse blocks, whose first word counts the non-zeros.
// All words are little-endian. Payloads follow each other without gaps.
//
//   tag        bits 6, 7 the mode, bit 5 whether there are signs, bits 0 to 4 the width w
//   kSigned    [a word of sign bits] w words: bit j of all |q|, from j = 0
//   kOffset    the lowest q as int16, then w words: bit j of all q - lowest
//   kSparse    a word that marks the non-zero q, then w bits for each of them, least significant first: |q| - 1, or
//              with signs 2 * (|q| - 1) + sign. The lowest 8 bits of all values come first, then, if w > 8, their
//              upper bits; each of the two parts ends at a byte
//   kRaw       the 32 numbers unchanged; no width, no signs
//
// Encoders choose the shortest mode; among equals kSigned goes before kOffset, and kOffset before kSparse. In a
// kSigned block the sign is set for negative q and for -0.0, which the two other modes cannot represent.
// A block of zeros has no payload; a block of equal numbers has two bytes.
// All functions are pure. Sizes are bytes, unless a name says bits.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/base/number_format.h"

namespace hydra::codec {

inline constexpr int kBlockNumbers = 32;
inline constexpr int kMostBlockBytes = 128;
/// Encoders write, and decoders read, up to this many bytes beyond a payload.
inline constexpr int kSlackBytes = 192;

enum class Mode : std::uint8_t { kSigned, kOffset, kSparse, kRaw };

inline constexpr std::uint8_t kRawTag = 0xC0;

struct Tag {
  Mode mode = Mode::kSigned;
  bool signs = false;
  int width = 0;

  constexpr std::uint8_t byte() const noexcept {
    return static_cast<std::uint8_t>(static_cast<int>(mode) << 6 | static_cast<int>(signs) << 5 | width);
  }
  static constexpr Tag of(std::uint8_t byte) noexcept {
    return {static_cast<Mode>(byte >> 6), (byte & 0x20) != 0, byte & 0x1F};
  }
  /// Whether an encoder can have made this tag.
  constexpr bool valid() const noexcept {
    switch (mode) {
      case Mode::kSigned:
        return width <= 15;
      case Mode::kOffset:
        return width <= 16 && !signs;
      case Mode::kSparse:
        return width <= 16;
      case Mode::kRaw:
        return width == 0 && !signs;
    }
    return false;
  }
};

/// The properties of a quantised block that decide its tag.
struct Summary {
  int lowest = 0;
  int highest = 0;
  std::uint32_t nonzero = 0;
  std::uint32_t negative = 0;
  std::uint32_t negative_zeros = 0;  // marks numbers that are -0.0; their q is 0
};

/// The modes that an encoder chooses from.
enum class Choice : std::uint8_t {
  kShortest,
  kSigned,  // kSigned or kRaw only: the fastest
};

/// The bit width of a number below 2^24. Computed from a float's exponent, which every instruction set can vectorise.
constexpr int bits_of(int value) noexcept {
  const int exponent = (std::bit_cast<std::int32_t>(static_cast<float>(value)) >> 23) - 126;
  return exponent > 0 ? exponent : 0;
}

/// The byte of the shortest tag. `nonzero` counts the non-zero quanta. Free of branches, so that loops vectorise.
constexpr int shortest(int lowest, int highest, int nonzero, bool negative, bool negative_zeros) noexcept {
  const int largest = highest > -lowest ? highest : -lowest;
  const int never = negative_zeros ? 1 << 20 : 0;
  const int signs = negative || negative_zeros ? 1 : 0;
  const int signed_width = bits_of(largest);
  const int signed_bits = 32 * (signed_width + signs);
  const int signed_byte = signs << 5 | signed_width;
  const int offset_width = bits_of(highest - lowest);
  const int offset_bits = 32 * offset_width + 16 + never;
  const int offset_byte = static_cast<int>(Mode::kOffset) << 6 | offset_width;
  const int sparse_signs = negative ? 1 : 0;
  const int sparse_width = bits_of(largest - (largest != 0 ? 1 : 0)) + sparse_signs;
  const int sparse_bits = 32 + nonzero * sparse_width + never;
  const int sparse_byte = static_cast<int>(Mode::kSparse) << 6 | sparse_signs << 5 | sparse_width;
  const int dense_bits = offset_bits < signed_bits ? offset_bits : signed_bits;
  const int dense_byte = offset_bits < signed_bits ? offset_byte : signed_byte;
  return sparse_bits < dense_bits ? sparse_byte : dense_byte;
}

constexpr Tag shortest(const Summary& block) noexcept {
  return Tag::of(static_cast<std::uint8_t>(shortest(block.lowest, block.highest, std::popcount(block.nonzero),
                                                    block.negative != 0, block.negative_zeros != 0)));
}

constexpr Tag signed_tag(const Summary& block) noexcept {
  const int largest = block.highest > -block.lowest ? block.highest : -block.lowest;
  return {Mode::kSigned, (block.negative | block.negative_zeros) != 0, bits_of(largest)};
}

/// The bytes of `count` values of `width` bits side by side.
constexpr int packed_bytes(int count, int width) noexcept {
  return static_cast<int>((static_cast<unsigned>(count * width) + 7U) / 8U);
}

/// The payload's size. `nonzero` is the number of ones in the first word; only sparse blocks use it.
constexpr int payload_bytes(Tag tag, int nonzero, NumberFormat format) noexcept {
  const int low = tag.width < 8 ? tag.width : 8;
  switch (tag.mode) {
    case Mode::kSigned:
      return 4 * (static_cast<int>(tag.signs) + tag.width);
    case Mode::kOffset:
      return 2 + 4 * tag.width;
    case Mode::kSparse:
      return 4 + packed_bytes(nonzero, low) + packed_bytes(nonzero, tag.width - low);
    case Mode::kRaw:
      break;
  }
  return static_cast<int>(kBlockNumbers * bytes_of(format));
}

}  // namespace hydra::codec
