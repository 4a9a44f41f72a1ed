#include "csrc/io/checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace hydra {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78U;  // 0x1edc6f41, its bits reversed
constexpr std::size_t kWord = 8;

using Table = std::array<std::array<std::uint32_t, 256>, kWord>;

/// tables[k][b]: the contribution of a byte b to the remainder, k bytes later.
constexpr Table make_tables() {
  Table tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder >> 1) ^ ((remainder & 1U) != 0 ? kPolynomial : 0U);
    }
    tables[0][byte] = remainder;
  }
  for (std::size_t later = 1; later < kWord; ++later) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[later - 1][byte];
      tables[later][byte] = (before >> 8) ^ tables[0][before & 0xffU];
    }
  }
  return tables;
}

constexpr Table kTables = make_tables();

std::uint32_t by_tables(const std::uint8_t* data, std::size_t bytes, std::uint32_t remainder) noexcept {
  for (; bytes >= kWord; data += kWord, bytes -= kWord) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, kWord);
    word ^= remainder;
    remainder = 0;
    for (std::size_t place = 0; place < kWord; ++place) {
      remainder ^= kTables[kWord - 1 - place][(word >> (8 * place)) & 0xffU];
    }
  }
  for (; bytes > 0; ++data, --bytes) {
    remainder = (remainder >> 8) ^ kTables[0][(remainder ^ *data) & 0xffU];
  }
  return remainder;
}

#if defined(__x86_64__)

// The instruction has a latency of three cycles and a throughput of one per cycle. So three streams run at a time, and
// their remainders are combined with the effect of a stream of zeros.
constexpr std::size_t kStream = 4096;

/// Returns the remainder after kStream more zero bytes.
class AfterZeros {
 public:
  constexpr AfterZeros() {
    for (std::uint32_t bit = 0; bit < 32; ++bit) {
      std::uint32_t remainder = 1U << bit;
      for (std::size_t byte = 0; byte < kStream; ++byte) {
        remainder = (remainder >> 8) ^ kTables[0][remainder & 0xffU];
      }
      of_bit_[bit] = remainder;
    }
  }
  std::uint32_t operator()(std::uint32_t remainder) const noexcept {
    std::uint32_t sum = 0;
    for (std::uint32_t bit = 0; bit < 32; ++bit) {
      sum ^= of_bit_[bit] & (0U - ((remainder >> bit) & 1U));
    }
    return sum;
  }

 private:
  std::array<std::uint32_t, 32> of_bit_{};
};

std::uint64_t word_at(const std::uint8_t* data) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, data, kWord);
  return word;
}

__attribute__((target("sse4.2"))) std::uint32_t by_instruction(const std::uint8_t* data, std::size_t bytes,
                                                               std::uint32_t remainder) noexcept {
  static const AfterZeros after_zeros;
  for (; bytes >= 3 * kStream; data += 3 * kStream, bytes -= 3 * kStream) {
    std::uint64_t first = remainder;
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t at = 0; at < kStream; at += kWord) {
      first = _mm_crc32_u64(first, word_at(data + at));
      second = _mm_crc32_u64(second, word_at(data + kStream + at));
      third = _mm_crc32_u64(third, word_at(data + 2 * kStream + at));
    }
    remainder = after_zeros(after_zeros(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second)) ^
                static_cast<std::uint32_t>(third);
  }
  std::uint64_t wide = remainder;
  for (; bytes >= kWord; data += kWord, bytes -= kWord) {
    wide = _mm_crc32_u64(wide, word_at(data));
  }
  remainder = static_cast<std::uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) {
    remainder = _mm_crc32_u8(remainder, *data);
  }
  return remainder;
}

#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, Bytes bytes, std::uint32_t before) noexcept {
  return ~by_tables(static_cast<const std::uint8_t*>(data), static_cast<std::size_t>(bytes), ~before);
}

std::uint32_t crc32c(const void* data, Bytes bytes, std::uint32_t before) noexcept {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) {
    return ~by_instruction(static_cast<const std::uint8_t*>(data), static_cast<std::size_t>(bytes), ~before);
  }
#endif
  return crc32c_portable(data, bytes, before);
}

}  // namespace hydra
