// Whole arrays, compressed within an error bound and back: one stream of bytes, the same from every instruction set,
// number of threads, and device.
//
// A stream, little-endian:
//   header     StreamHeader, 48 bytes
//   ends       for each chunk of 1024 blocks: where its payload ends, from the payload's beginning, 8 bytes
//   tags       a byte for each block of 32 numbers (block.h), filled up with zeros to a multiple of 8
//   payload    of all blocks
// The last block is filled up with zeros, which are cut off again.
//
// Reentrant; nothing is kept between calls.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "csrc/base/instruction_set.h"
#include "csrc/base/thread_pool.h"
#include "csrc/base/types.h"
#include "csrc/codec/block.h"
#include "csrc/codec/quantizer.h"

namespace hydra::codec {

inline constexpr std::int64_t kChunkBlocks = 1024;

struct StreamHeader {
  std::array<char, 4> magic{};
  std::uint16_t version = 0;
  NumberFormat format = NumberFormat::kFloat32;
  std::uint8_t keeps_signs = 0;
  std::int64_t count = 0;  // numbers
  std::int64_t payload_bytes = 0;
  float bound = 0;
  float step = 0;
  std::array<std::uint64_t, 2> reserved{};
};
static_assert(sizeof(StreamHeader) == 48);

/// What a stream of so many numbers may take at most, what compress() writes to included.
Bytes most_bytes(NumberFormat format, std::int64_t count) noexcept;

/// Writes the stream of `count` numbers to `to`, which has most_bytes(), and returns its length. The two may not
/// overlap.
Bytes compress(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t count, std::uint8_t* to,
               ThreadPool& threads, InstructionSet instructions);

/// What a stream takes that begins so.
Bytes stream_bytes(const StreamHeader& header) noexcept;

/// Throws DamagedStream for what is no stream, of another version, or cut off. Of a stream of `size` bytes no more is
/// read than the header.
StreamHeader header_of(std::span<const std::uint8_t> begin, Bytes size);
inline StreamHeader header_of(std::span<const std::uint8_t> stream) {
  return header_of(stream, static_cast<Bytes>(stream.size()));
}

/// Writes header_of(stream).count numbers. Throws DamagedStream for bytes that no compress() has written; what has been
/// written to `numbers` then is undefined. Never reads or writes anything else.
void decompress(std::span<const std::uint8_t> stream, void* numbers, ThreadPool& threads, InstructionSet instructions);

}  // namespace hydra::codec
