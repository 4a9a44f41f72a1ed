// Offsets of a stream's parts, in bytes from its beginning; codec.h describes the parts. Used on the host and on GPUs.
#pragma once

#include "csrc/codec/codec.h"

namespace hydra::codec {

inline constexpr std::array<char, 4> kMagic = {'H', 'Y', 'C', 'X'};
inline constexpr std::uint16_t kVersion = 1;
inline constexpr Bytes kHeaderBytes = sizeof(StreamHeader);

constexpr Bytes block_bytes(NumberFormat format) noexcept { return kBlockNumbers * bytes_of(format); }

struct Layout {
  std::int64_t blocks = 0;
  std::int64_t chunks = 0;
  Bytes tags = 0;
  Bytes payload = 0;

  constexpr explicit Layout(std::int64_t count) noexcept
      : blocks((count + kBlockNumbers - 1) / kBlockNumbers),
        chunks((blocks + kChunkBlocks - 1) / kChunkBlocks),
        tags(kHeaderBytes + 8 * chunks),
        payload(tags + round_up(blocks, 8)) {}

  constexpr std::int64_t blocks_of(std::int64_t chunk) const noexcept {
    const std::int64_t left = blocks - chunk * kChunkBlocks;
    return left < kChunkBlocks ? left : kChunkBlocks;
  }
};

constexpr StreamHeader make_header(const Quantizer& quantizer, std::int64_t count, Bytes payload_bytes) noexcept {
  return {kMagic,         kVersion, quantizer.format, quantizer.keep_signs, count, payload_bytes, quantizer.bound,
          quantizer.step, {}};
}

}  // namespace hydra::codec
