// The work of one warp on a group of 32 blocks, one block after the other. Lane i keeps the tag of block i.
// Included like warp_block.h, and after it.
//
// Two passes compress: the first measures each group, which gives the beginnings of all groups; the second
// quantises once more and writes. A reader has to find the beginnings of groups: a tag gives the length of its block,
// except that sparse blocks need their first word too. So a reader walks each chunk from its beginning.
// Memory is the caller's. Sizes are bytes.

inline constexpr std::int64_t kGroupBlocks = 32;
inline constexpr std::int64_t kChunkGroups = kChunkBlocks / kGroupBlocks;

constexpr std::int64_t groups_of(std::int64_t blocks) noexcept { return (blocks + kGroupBlocks - 1) / kGroupBlocks; }

/// The array of numbers that a kernel compresses, or restores.
template <class Pointer>
struct NumberArray {
  Pointer data;
  std::int64_t count;
  std::int64_t blocks;

  /// The number of blocks in a group; fewer than 32 in the last one.
  HYDRA_INLINE int blocks_of(std::int64_t group) const {
    const std::int64_t left = blocks - group * kGroupBlocks;
    return static_cast<int>(left < kGroupBlocks ? left : kGroupBlocks);
  }
};

HYDRA_INLINE Each<std::uint32_t> patterns_of(NumberFormat format, const NumberArray<const void*>& numbers,
                                             std::int64_t block) {
  Each<std::uint32_t> patterns{};
  Warp::each([&](int lane) {
    patterns[lane] = pattern_at(format, numbers.data, block * kBlockNumbers + lane, numbers.count);
  });
  return patterns;
}

/// Writes the tags of a group's blocks to their places among all tags, and returns the bytes of their payload.
HYDRA_INLINE std::uint32_t measure_group(const Quantizer& quantizer, Choice choice,
                                         const NumberArray<const void*>& numbers, std::int64_t group,
                                         std::uint8_t* tags) {
  Each<std::uint8_t> tag{};
  std::uint32_t bytes = 0;
  const int blocks = numbers.blocks_of(group);
  for (int at = 0; at < blocks; ++at) {
    const WarpBlock block =
        quantized(quantizer, choice, patterns_of(quantizer.format, numbers, group * kGroupBlocks + at));
    bytes += static_cast<std::uint32_t>(bytes_taken(block, quantizer.format));
    Warp::each([&](int lane) { tag[lane] = lane == at ? block.tag.byte() : tag[lane]; });
  }
  Warp::each([&](int lane) {
    if (lane < blocks) {
      tags[group * kGroupBlocks + lane] = tag[lane];
    }
  });
  return bytes;
}

/// The payload bytes of the groups before this one in its chunk.
HYDRA_INLINE std::uint32_t bytes_before(const std::uint32_t* group_bytes, std::int64_t group) {
  const std::int64_t first = group - group % kChunkGroups;
  Each<std::uint32_t> bytes{};
  Warp::each([&](int lane) { bytes[lane] = first + lane < group ? group_bytes[first + lane] : 0; });
  return Warp::sum(bytes);
}

HYDRA_INLINE void write_group(const Quantizer& quantizer, Choice choice, const NumberArray<const void*>& numbers,
                              std::int64_t group, std::uint32_t* words, std::uint8_t* to) {
  const int blocks = numbers.blocks_of(group);
  for (int at = 0; at < blocks; ++at) {
    const Each<std::uint32_t> patterns = patterns_of(quantizer.format, numbers, group * kGroupBlocks + at);
    const WarpBlock block = quantized(quantizer, choice, patterns);
    put_block(block, patterns, quantizer.format, words, to);
    to += bytes_taken(block, quantizer.format);
  }
}

// ---- back -----------------------------------------------------------------------------------------------------------
/// The bytes of the block at `from`, where `left` bytes are readable. A damaged block gives more than `left`.
HYDRA_INLINE std::int64_t bytes_at(NumberFormat format, Tag tag, const std::uint8_t* from, std::int64_t left) {
  if (!tag.valid()) {
    return left + 1;
  }
  int nonzero = 0;
  if (tag.mode == Mode::kSparse) {
    if (left < 4) {
      return left + 1;
    }
    for (int byte = 0; byte < 4; ++byte) {
      nonzero += std::popcount(static_cast<unsigned>(from[byte]));
    }
  }
  return payload_bytes(tag, nonzero, format);
}

/// Finds the beginning of each group in a chunk's payload; one thread runs it. Returns false if the payload's length is
/// not the one that its tags give. read_group() may be called only after true.
HYDRA_INLINE bool find_groups(NumberFormat format, const std::uint8_t* tags, std::int64_t blocks,
                              const std::uint8_t* payload, std::int64_t bytes, std::uint32_t* begins) {
  std::int64_t at = 0;
  for (std::int64_t block = 0; block < blocks; ++block) {
    if (block % kGroupBlocks == 0) {
      begins[block / kGroupBlocks] = static_cast<std::uint32_t>(at);
    }
    at += bytes_at(format, Tag::of(tags[block]), payload + at, bytes - at);
    if (at > bytes) {
      return false;
    }
  }
  return at == bytes;
}

HYDRA_INLINE void read_group(NumberFormat format, float step, const NumberArray<void*>& numbers, std::int64_t group,
                             const std::uint8_t* tags, const std::uint8_t* payload, std::uint32_t* words) {
  const int blocks = numbers.blocks_of(group);
  for (int at = 0; at < blocks; ++at) {
    const std::int64_t block = group * kGroupBlocks + at;
    const Tag tag = Tag::of(tags[block]);
    const auto bytes = static_cast<int>(bytes_at(format, tag, payload, kMostBlockBytes));
    const Each<std::uint32_t> patterns = get_block(format, step, tag, payload, bytes, words);
    payload += bytes;
    Warp::each([&](int lane) {
      const std::int64_t index = block * kBlockNumbers + lane;
      if (index < numbers.count && format == NumberFormat::kFloat32) {
        static_cast<std::uint32_t*>(numbers.data)[index] = patterns[lane];
      } else if (index < numbers.count) {
        static_cast<std::uint16_t*>(numbers.data)[index] = static_cast<std::uint16_t>(patterns[lane]);
      }
    });
  }
}
