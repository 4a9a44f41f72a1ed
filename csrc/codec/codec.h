// Compresses whole arrays within an error bound, and restores them.
//
// The stream has the same bytes for every instruction set, number of threads and device. It is little-endian:
//   header     StreamHeader, 48 bytes
//   ends       8 bytes for each chunk of 1024 blocks: the end of its payload, counted from the payload's beginning
//   tags       a byte for each block of 32 numbers (block.h), padded with zeros to a multiple of 8
//   payload    the payloads of all blocks
// Zeros pad the last block; the decoder drops them.
//
// Memory is the caller's. Reentrant; no state is kept between calls. Sizes are bytes, counts are numbers.
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

/// The room that compress() needs for `count` numbers, including the slack that it writes behind the stream.
Bytes most_bytes(NumberFormat format, std::int64_t count) noexcept;

/// Writes the stream of `count` numbers to `to`, which has most_bytes(), and returns the stream's length. The two must
/// not overlap.
Bytes compress(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t count, std::uint8_t* to,
               ThreadPool& threads, InstructionSet instructions);

/// The size of the stream that begins with this header.
Bytes stream_bytes(const StreamHeader& header) noexcept;

/// Reads the header of a stream of `size` bytes, of which `begin` has at least the header. Throws DamagedStream if the
/// bytes are not a stream, or a stream of another version, or cut off.
StreamHeader header_of(std::span<const std::uint8_t> begin, Bytes size);
inline StreamHeader header_of(std::span<const std::uint8_t> stream) {
  return header_of(stream, static_cast<Bytes>(stream.size()));
}

/// Writes header_of(stream).count numbers. Throws DamagedStream for bytes that compress() cannot have written; the
/// contents of `numbers` are undefined then. Never reads or writes outside the two arrays.
void decompress(std::span<const std::uint8_t> stream, void* numbers, ThreadPool& threads, InstructionSet instructions);

}  // namespace hydra::codec
