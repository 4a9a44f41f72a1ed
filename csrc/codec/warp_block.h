// The work of one warp on a block: lane i has the block's number i. The bytes equal those of the host's kernels.
//
// The CUDA kernels include this file inside a namespace of their own, after they have defined HYDRA_INLINE and Warp.
// Tests do the same, with a warp that loops over its lanes. The file has no include guard on purpose.
//
// Warp has these static members:
//   Each<T>              a value for each lane: each[lane]
//   each(f)              calls f(lane) in every lane
//   ballot(f)            a word whose bit i is f(i)
//   least(each<int>)     the smallest of all lanes' values; greatest() likewise
//   add_bits(word, bits) word |= bits, atomically among the lanes
//   meet()               a barrier: all lanes read afterwards what any lane has written before
// All lanes make the same calls with the same arguments, except for values in an Each.
//
// The lanes assemble a block's payload bit by bit in kStagedWords words of shared memory.

inline constexpr int kStagedWords = 34;  // 33 for the longest valid payload; bits are read and put across two words

template <class T>
using Each = typename Warp::template Each<T>;

struct WarpBlock {
  Each<int> quanta;
  Summary summary;
  Tag tag;
};

HYDRA_INLINE float number_of(NumberFormat format, std::uint32_t pattern) {
  switch (format) {
    case NumberFormat::kBfloat16:
      return float_of_bfloat16(static_cast<std::uint16_t>(pattern));
    case NumberFormat::kFloat16:
      return float_of_float16(static_cast<std::uint16_t>(pattern));
    default:
      return std::bit_cast<float>(pattern);
  }
}

/// The bit pattern of a number that the format can represent exactly.
HYDRA_INLINE std::uint32_t pattern_of(NumberFormat format, float number) {
  switch (format) {
    case NumberFormat::kBfloat16:
      return truncated_to_bfloat16(number);
    case NumberFormat::kFloat16:
      return float16_of(number);
    default:
      return std::bit_cast<std::uint32_t>(number);
  }
}

/// The bit pattern of number `index`; zero behind the last number.
HYDRA_INLINE std::uint32_t pattern_at(NumberFormat format, const void* numbers, std::int64_t index,
                                      std::int64_t count) {
  if (index >= count) {
    return 0;
  }
  return format == NumberFormat::kFloat32 ? static_cast<const std::uint32_t*>(numbers)[index]
                                          : static_cast<const std::uint16_t*>(numbers)[index];
}

/// Returns false if the number's block has to be stored raw.
HYDRA_INLINE bool quantize(const Quantizer& quantizer, float number, int& quantum) {
  quantum = 0;
  if (!(std::fabs(number) < quantizer.limit)) {
    return false;
  }
  quantum = static_cast<int>(std::nearbyint(number * quantizer.inverse));
  if (quantizer.keep_signs && quantum == 0 && number != 0) {
    quantum = number > 0 ? 1 : -1;
  }
  return std::fabs(number - static_cast<float>(quantum) * quantizer.step) <= quantizer.bound;
}

HYDRA_INLINE WarpBlock quantized(const Quantizer& quantizer, Choice choice, const Each<std::uint32_t>& patterns) {
  WarpBlock block;
  const auto number = [&](int lane) { return number_of(quantizer.format, patterns[lane]); };
  const std::uint32_t fit =
      Warp::ballot([&](int lane) { return quantize(quantizer, number(lane), block.quanta[lane]); });
  if (fit != ~0U) {
    block.tag = Tag::of(kRawTag);
    return block;
  }
  block.summary.negative = Warp::ballot([&](int lane) { return block.quanta[lane] < 0; });
  block.summary.negative_zeros =
      Warp::ballot([&](int lane) { return std::bit_cast<std::uint32_t>(number(lane)) == 0x80000000U; });
  block.summary.nonzero = Warp::ballot([&](int lane) { return block.quanta[lane] != 0; });
  block.summary.lowest = Warp::least(block.quanta);
  block.summary.highest = Warp::greatest(block.quanta);
  block.tag = choice == Choice::kShortest ? shortest(block.summary) : signed_tag(block.summary);
  return block;
}

HYDRA_INLINE int bytes_taken(const WarpBlock& block, NumberFormat format) {
  return payload_bytes(block.tag, std::popcount(block.summary.nonzero), format);
}

// ---- bits of the staged words ---------------------------------------------------------------------------------------
/// `width` is at most 32, and `value` has no more bits.
HYDRA_INLINE void put_bits(std::uint32_t* words, int bit, std::uint32_t value, int width) {
  const int shift = bit % 32;
  Warp::add_bits(words[bit / 32], value << shift);
  if (shift + width > 32) {
    Warp::add_bits(words[bit / 32 + 1], value >> (32 - shift));
  }
}

HYDRA_INLINE std::uint32_t bits_at(const std::uint32_t* words, int bit, int width) {
  const int shift = bit % 32;
  const std::uint64_t both = words[bit / 32] | static_cast<std::uint64_t>(words[bit / 32 + 1]) << 32;
  return static_cast<std::uint32_t>(both >> shift) & ((2U << (width - 1)) - 1U);
}

HYDRA_INLINE std::uint32_t mask_below(int lane) { return (1U << lane) - 1U; }

/// The widths of the two parts of a sparse block's values, and the beginning of the second part.
struct SparseParts {
  int low = 0;
  int high = 0;
  int high_begin = 0;

  HYDRA_INLINE SparseParts(Tag tag, std::uint32_t nonzero)
      : low(tag.width < 8 ? tag.width : 8),
        high(tag.width - low),
        high_begin(32 + 8 * packed_bytes(std::popcount(nonzero), low)) {}
};

HYDRA_INLINE void put_sparse(const WarpBlock& block, std::uint32_t* words) {
  const std::uint32_t nonzero = block.summary.nonzero;
  const SparseParts parts(block.tag, nonzero);
  Warp::each([&](int lane) {
    if (lane == 0) {
      put_bits(words, 0, nonzero, 32);
    }
    if ((nonzero >> lane & 1U) == 0) {
      return;
    }
    const int quantum = block.quanta[lane];
    const auto less = static_cast<std::uint32_t>((quantum < 0 ? -quantum : quantum) - 1);
    const std::uint32_t value = block.tag.signs ? 2 * less + static_cast<std::uint32_t>(quantum < 0) : less;
    const int index = std::popcount(nonzero & mask_below(lane));
    put_bits(words, 32 + index * parts.low, value & mask_below(parts.low), parts.low);
    put_bits(words, parts.high_begin + index * parts.high, value >> parts.low, parts.high);
  });
}

HYDRA_INLINE void put_dense(const WarpBlock& block, std::uint32_t* words) {
  const bool offset = block.tag.mode == Mode::kOffset;
  const int lowest = block.summary.lowest;
  const std::uint32_t first =
      offset ? static_cast<std::uint16_t>(lowest) : block.summary.negative | block.summary.negative_zeros;
  const int first_bits = offset ? 16 : block.tag.signs ? 32 : 0;
  Each<std::uint32_t> plane{};
  for (int at = 0; at < block.tag.width; ++at) {
    const std::uint32_t word = Warp::ballot([&](int lane) {
      const int quantum = block.quanta[lane];
      const int value = offset ? quantum - lowest : quantum < 0 ? -quantum : quantum;
      return (value >> at & 1) != 0;
    });
    Warp::each([&](int lane) { plane[lane] = lane == at ? word : plane[lane]; });
  }
  Warp::each([&](int lane) {
    if (lane == 0 && first_bits != 0) {
      put_bits(words, 0, first, first_bits);
    }
    if (lane < block.tag.width) {
      put_bits(words, first_bits + 32 * lane, plane[lane], 32);
    }
  });
}

/// Writes the block's payload, and no byte behind it.
HYDRA_INLINE void put_block(const WarpBlock& block, const Each<std::uint32_t>& patterns, NumberFormat format,
                            std::uint32_t* words, std::uint8_t* to) {
  Warp::each([&](int lane) {
    for (int word = lane; word < kStagedWords; word += kBlockNumbers) {
      words[word] = 0;
    }
  });
  Warp::meet();
  if (block.tag.mode == Mode::kRaw) {
    const int width = 8 * static_cast<int>(hydra::bytes_of(format));
    Warp::each([&](int lane) { put_bits(words, lane * width, patterns[lane], width); });
  } else if (block.tag.mode == Mode::kSparse) {
    put_sparse(block, words);
  } else {
    put_dense(block, words);
  }
  Warp::meet();
  const int bytes = bytes_taken(block, format);
  Warp::each([&](int lane) {
    for (int at = lane; at < bytes; at += kBlockNumbers) {
      to[at] = static_cast<std::uint8_t>(words[at / 4] >> (8 * (at % 4)));
    }
  });
  Warp::meet();
}

// ---- back -----------------------------------------------------------------------------------------------------------
HYDRA_INLINE int sparse_quantum(std::uint32_t nonzero, Tag tag, const std::uint32_t* words, int lane) {
  if ((nonzero >> lane & 1U) == 0) {
    return 0;
  }
  const SparseParts parts(tag, nonzero);
  const int index = std::popcount(nonzero & mask_below(lane));
  std::uint32_t value = parts.low == 0 ? 0 : bits_at(words, 32 + index * parts.low, parts.low);
  value |= parts.high == 0 ? 0 : bits_at(words, parts.high_begin + index * parts.high, parts.high) << 8;
  const auto less = static_cast<int>(tag.signs ? value >> 1 : value);
  return tag.signs && (value & 1U) != 0 ? -1 - less : 1 + less;
}

HYDRA_INLINE int dense_quantum(Tag tag, const std::uint32_t* words, int lane) {
  const bool offset = tag.mode == Mode::kOffset;
  const int first = offset ? 16 : tag.signs ? 32 : 0;
  int value = 0;
  for (int plane = 0; plane < tag.width; ++plane) {
    value |= static_cast<int>(bits_at(words, first + 32 * plane + lane, 1)) << plane;
  }
  return offset ? static_cast<std::int16_t>(value + static_cast<std::int16_t>(words[0] & 0xFFFFU)) : value;
}

/// The bit patterns of the block whose payload is the `bytes` at `from`. No byte behind the payload is read.
HYDRA_INLINE Each<std::uint32_t> get_block(NumberFormat format, float step, Tag tag, const std::uint8_t* from,
                                           int bytes, std::uint32_t* words) {
  Warp::each([&](int lane) {
    for (int word = lane; word < kStagedWords; word += kBlockNumbers) {
      words[word] = 0;
      for (int at = 4 * word; at < bytes && at < 4 * word + 4; ++at) {
        words[word] |= static_cast<std::uint32_t>(from[at]) << (8 * (at % 4));
      }
    }
  });
  Warp::meet();
  Each<std::uint32_t> patterns{};
  const bool negative = tag.mode == Mode::kSigned && tag.signs;
  Warp::each([&](int lane) {
    if (tag.mode == Mode::kRaw) {
      const int width = 8 * static_cast<int>(hydra::bytes_of(format));
      patterns[lane] = bits_at(words, lane * width, width);
      return;
    }
    const int quantum =
        tag.mode == Mode::kSparse ? sparse_quantum(words[0], tag, words, lane) : dense_quantum(tag, words, lane);
    const float number = static_cast<float>(quantum) * step;
    patterns[lane] = pattern_of(format, negative && (words[0] >> lane & 1U) != 0 ? -number : number);
  });
  Warp::meet();
  return patterns;
}
