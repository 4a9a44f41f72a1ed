// Portable kernels that take one number at a time. Tests compare the bytes of the other kernels with theirs.
#include <array>
#include <cmath>
#include <cstring>

#include "csrc/base/half.h"
#include "csrc/codec/bytes.h"
#include "csrc/codec/kernels/kernels.h"

namespace hydra::codec {

namespace {

using Block = std::array<int, kBlockNumbers>;

std::uint32_t bits_of_float(float value) { return std::bit_cast<std::uint32_t>(value); }

float load(NumberFormat format, const void* numbers, std::int64_t index) {
  if (format == NumberFormat::kFloat32) {
    return static_cast<const float*>(numbers)[index];
  }
  const std::uint16_t half = static_cast<const std::uint16_t*>(numbers)[index];
  return format == NumberFormat::kBfloat16 ? float_of_bfloat16(half) : float_of_float16(half);
}

/// Stores a number that the format can represent exactly.
void store(NumberFormat format, void* numbers, std::int64_t index, float value) {
  if (format == NumberFormat::kFloat32) {
    static_cast<float*>(numbers)[index] = value;
    return;
  }
  static_cast<std::uint16_t*>(numbers)[index] =
      format == NumberFormat::kBfloat16 ? truncated_to_bfloat16(value) : float16_of(value);
}

/// Returns false if the block has to be stored raw.
bool quantize(const Quantizer& quantizer, const void* numbers, std::int64_t first, Block& quanta, Summary& summary) {
  for (int i = 0; i < kBlockNumbers; ++i) {
    const float x = load(quantizer.format, numbers, first + i);
    if (!(std::fabs(x) < quantizer.limit)) {
      return false;
    }
    const std::uint32_t bit = 1U << i;
    int quantum = static_cast<int>(std::nearbyint(x * quantizer.inverse));
    if (quantizer.keep_signs && quantum == 0 && x != 0) {
      quantum = x > 0 ? 1 : -1;
    }
    if (!(std::fabs(x - static_cast<float>(quantum) * quantizer.step) <= quantizer.bound)) {
      return false;
    }
    quanta[static_cast<std::size_t>(i)] = quantum;
    summary.lowest = i == 0 || quantum < summary.lowest ? quantum : summary.lowest;
    summary.highest = i == 0 || quantum > summary.highest ? quantum : summary.highest;
    summary.nonzero |= quantum != 0 ? bit : 0;
    summary.negative |= quantum < 0 ? bit : 0;
    summary.negative_zeros |= bits_of_float(x) == 0x80000000U ? bit : 0;
  }
  return true;
}

std::uint8_t* put_planes(std::uint8_t* to, const Block& values, int width) {
  for (int plane = 0; plane < width; ++plane) {
    std::uint32_t word = 0;
    for (unsigned i = 0; i < kBlockNumbers; ++i) {
      word |= (static_cast<std::uint32_t>(values[i]) >> plane & 1U) << i;
    }
    to = put(to, word);
  }
  return to;
}

/// Packs `width` bits of each value, at most 8, from bit `shift` on.
std::uint8_t* put_packed(std::uint8_t* to, const Block& values, int count, int shift, int width) {
  std::uint32_t pending = 0;
  int bits = 0;
  for (unsigned i = 0; i < static_cast<unsigned>(count); ++i) {
    pending |= (static_cast<std::uint32_t>(values[i]) >> shift & ((1U << width) - 1)) << bits;
    for (bits += width; bits >= 8; bits -= 8, pending >>= 8) {
      *to++ = static_cast<std::uint8_t>(pending);
    }
  }
  if (bits > 0) {
    *to++ = static_cast<std::uint8_t>(pending);
  }
  return to;
}

std::uint8_t* put_sparse(std::uint8_t* to, const Block& quanta, const Summary& summary, Tag tag) {
  Block values;
  int count = 0;
  for (const int quantum : quanta) {
    if (quantum != 0) {
      const int less = std::abs(quantum) - 1;
      values[static_cast<std::size_t>(count++)] = tag.signs ? 2 * less + (quantum < 0) : less;
    }
  }
  to = put(to, summary.nonzero);
  to = put_packed(to, values, count, 0, tag.width < 8 ? tag.width : 8);
  return tag.width > 8 ? put_packed(to, values, count, 8, tag.width - 8) : to;
}

std::uint8_t* put_block(std::uint8_t* to, const Block& quanta, const Summary& summary, Tag tag) {
  Block values;
  switch (tag.mode) {
    case Mode::kSparse:
      return put_sparse(to, quanta, summary, tag);
    case Mode::kOffset:
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = quanta[i] - summary.lowest;
      }
      return put_planes(put(to, static_cast<std::int16_t>(summary.lowest)), values, tag.width);
    default:
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = std::abs(quanta[i]);
      }
      to = tag.signs ? put(to, summary.negative | summary.negative_zeros) : to;
      return put_planes(to, values, tag.width);
  }
}

std::uint8_t* encode(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t blocks,
                     std::uint8_t* tags, std::uint8_t* payload) noexcept {
  const std::int64_t raw_bytes = kBlockNumbers * bytes_of(quantizer.format);
  for (std::int64_t block = 0; block < blocks; ++block) {
    Block quanta;
    Summary summary;
    if (quantize(quantizer, numbers, block * kBlockNumbers, quanta, summary)) {
      const Tag tag = choice == Choice::kShortest ? shortest(summary) : signed_tag(summary);
      tags[block] = tag.byte();
      payload = put_block(payload, quanta, summary, tag);
    } else {
      tags[block] = kRawTag;
      std::memcpy(payload, static_cast<const std::uint8_t*>(numbers) + block * raw_bytes,
                  static_cast<std::size_t>(raw_bytes));
      payload += raw_bytes;
    }
  }
  return payload;
}

void get_planes(const std::uint8_t* from, int width, Block& values) {
  values.fill(0);
  for (int plane = 0; plane < width; ++plane) {
    const auto word = get<std::uint32_t>(from + 4 * plane);
    for (unsigned i = 0; i < kBlockNumbers; ++i) {
      values[i] |= static_cast<int>((word >> i & 1U) << plane);
    }
  }
}

int get_packed(const std::uint8_t* from, int index, int width) {
  const int bit = index * width;
  return static_cast<int>(get<std::uint32_t>(from + bit / 8) >> (bit % 8) & ((1U << width) - 1));
}

const std::uint8_t* get_sparse(const std::uint8_t* from, Tag tag, Block& quanta) {
  const auto nonzero = get<std::uint32_t>(from);
  const int count = std::popcount(nonzero);
  const int low = tag.width < 8 ? tag.width : 8;
  const int high = tag.width - low;
  const std::uint8_t* lower = from + 4;
  const std::uint8_t* upper = lower + packed_bytes(count, low);
  int index = 0;
  for (unsigned i = 0; i < kBlockNumbers; ++i) {
    if ((nonzero >> i & 1U) == 0) {
      quanta[i] = 0;
      continue;
    }
    const int value = get_packed(lower, index, low) | get_packed(upper, index, high) << 8;
    quanta[i] = tag.signs ? ((value & 1) != 0 ? -1 - (value >> 1) : 1 + (value >> 1)) : 1 + value;
    ++index;
  }
  return upper + packed_bytes(count, high);
}

const std::uint8_t* get_block(const Quantizer& quantizer, Tag tag, const std::uint8_t* from, void* numbers,
                              std::int64_t first) {
  Block quanta;
  std::uint32_t signs = 0;
  if (tag.mode == Mode::kSparse) {
    from = get_sparse(from, tag, quanta);
  } else if (tag.mode == Mode::kOffset) {
    const int lowest = get<std::int16_t>(from);
    get_planes(from + 2, tag.width, quanta);
    for (int& quantum : quanta) {
      quantum = static_cast<std::int16_t>(quantum + lowest);
    }
    from += 2 + 4 * tag.width;
  } else {
    signs = tag.signs ? get<std::uint32_t>(from) : 0;
    from += tag.signs ? 4 : 0;
    get_planes(from, tag.width, quanta);
    from += 4 * tag.width;
  }
  for (unsigned i = 0; i < kBlockNumbers; ++i) {
    const float value = static_cast<float>(quanta[i]) * quantizer.step;
    store(quantizer.format, numbers, first + i, (signs >> i & 1U) != 0 ? -value : value);
  }
  return from;
}

Decoded decode(const Quantizer& quantizer, const std::uint8_t* tags, std::int64_t blocks, const std::uint8_t* payload,
               const std::uint8_t* end, void* numbers) noexcept {
  const std::int64_t raw_bytes = kBlockNumbers * bytes_of(quantizer.format);
  std::int64_t block = 0;
  for (; block < blocks && end - payload >= kSlackBytes; ++block) {
    if (tags[block] == kRawTag) {
      std::memcpy(static_cast<std::uint8_t*>(numbers) + block * raw_bytes, payload,
                  static_cast<std::size_t>(raw_bytes));
      payload += raw_bytes;
    } else {
      payload = get_block(quantizer, Tag::of(tags[block]), payload, numbers, block * kBlockNumbers);
    }
  }
  return {block, payload};
}

}  // namespace

const Kernels kPortableKernels = {encode, decode};

}  // namespace hydra::codec
