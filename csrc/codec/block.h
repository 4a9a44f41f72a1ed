// A block: 32 numbers, a tag of one byte, and up to 128 bytes of payload, whose length follows from the tag, but for
// the count of a sparse block's non-zeros, which is in its first word. All words are little-endian; the payloads of
// blocks follow each other without gaps.
//
//   tag        bits 6, 7 the mode, bit 5 whether there are signs, bits 0 to 4 the width w
//   kSigned    [a word of sign bits] w words: bit j of all |q|, from j = 0
//   kOffset    the lowest q as int16, then w words: bit j of all q - lowest
//   kSparse    a word of which q are not 0, then of each of these w bits, least significant first: |q| - 1, with signs
//              2 * (|q| - 1) + sign. Their lowest 8 bits lie side by side, and if w > 8 the others after them; each of
//              the two parts ends at a byte
//   kRaw       the 32 numbers as they are; no width, no signs
//
// The shortest is taken, kSigned before kOffset before kSparse where they are equal. A sign of a kSigned block is set
// where q is negative, and where the number was -0.0, which the other two modes have no place for. A block of zeros
// takes no payload at all, one of equal numbers two bytes.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/base/number_format.h"

namespace hydra::codec {

inline constexpr int kBlockNumbers = 32;
inline constexpr int kMostBlockBytes = 128;
/// Encoders write, and decoders read, up to so much beyond what they are there for.
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
  /// Whether an encoder can have made it.
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

/// What the tag is chosen by, of a block that can be quantised.
struct Summary {
  int lowest = 0;
  int highest = 0;
  std::uint32_t nonzero = 0;
  std::uint32_t negative = 0;
  std::uint32_t negative_zeros = 0;  // of the numbers, not of q
};

/// Which encodings there are to choose from.
enum class Choice : std::uint8_t {
  kShortest,
  kSigned,  // fastest
};

/// Of a number below 2^24. As a float's exponent, so that a loop over it becomes vectors on every instruction set.
constexpr int bits_of(int value) noexcept {
  const int exponent = (std::bit_cast<std::int32_t>(static_cast<float>(value)) >> 23) - 126;
  return exponent > 0 ? exponent : 0;
}

/// The tag's byte. Without branches, for the same reason; `nonzero` is how many there are.
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

/// Of `count` values of `width` bits side by side.
constexpr int packed_bytes(int count, int width) noexcept {
  return static_cast<int>((static_cast<unsigned>(count * width) + 7U) / 8U);
}

/// `nonzero` is the number of ones in the first word, and matters to sparse blocks only.
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
