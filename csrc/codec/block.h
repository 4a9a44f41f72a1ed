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

  constexpr int largest() const noexcept { return highest > -lowest ? highest : -lowest; }
};

/// Which encodings there are to choose from.
enum class Choice : std::uint8_t {
  kShortest,
  kSigned,  // fastest
};

constexpr int bits_of(int value) noexcept { return static_cast<int>(std::bit_width(static_cast<unsigned>(value))); }

/// `a` or `b`, without a branch where the compiler can do so.
constexpr Tag either(bool first, Tag a, Tag b) noexcept {
  return Tag::of(static_cast<std::uint8_t>(first ? a.byte() : b.byte()));
}

constexpr Tag shortest(const Summary& block) noexcept {
  constexpr int kNever = 1 << 20;
  const int largest = block.largest();
  const int never = block.negative_zeros != 0 ? kNever : 0;
  const Tag with_signs{Mode::kSigned, (block.negative | block.negative_zeros) != 0, bits_of(largest)};
  const int signed_bits = 32 * (with_signs.width + static_cast<int>(with_signs.signs));
  const Tag offset{Mode::kOffset, false, bits_of(block.highest - block.lowest)};
  const int offset_bits = 32 * offset.width + 16 + never;
  const bool negative = block.negative != 0;
  const Tag sparse{Mode::kSparse, negative, bits_of(largest - (largest != 0)) + static_cast<int>(negative)};
  const int sparse_bits = 32 + std::popcount(block.nonzero) * sparse.width + never;
  const Tag dense = either(offset_bits < signed_bits, offset, with_signs);
  return either(sparse_bits < signed_bits && sparse_bits < offset_bits, sparse, dense);
}

constexpr Tag signed_tag(const Summary& block) noexcept {
  return {Mode::kSigned, (block.negative | block.negative_zeros) != 0, bits_of(block.largest())};
}

}  // namespace hydra::codec
