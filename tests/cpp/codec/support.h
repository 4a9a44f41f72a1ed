// Numbers to compress, and the check that a compression has kept its bound.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "csrc/base/half.h"
#include "csrc/codec/codec.h"
#include "csrc/codec/kernels/kernels.h"

namespace hydra::codec::test {

using Memory = std::vector<std::uint8_t>;

inline std::uint32_t pattern_at(NumberFormat format, const Memory& numbers, std::int64_t index) {
  std::uint32_t pattern = 0;
  const std::int64_t size = bytes_of(format);
  std::memcpy(&pattern, numbers.data() + index * size, static_cast<std::size_t>(size));
  return pattern;
}

inline void set_pattern(NumberFormat format, Memory& numbers, std::int64_t index, std::uint32_t pattern) {
  const std::int64_t size = bytes_of(format);
  std::memcpy(numbers.data() + index * size, &pattern, static_cast<std::size_t>(size));
}

inline float number_of(NumberFormat format, std::uint32_t pattern) {
  switch (format) {
    case NumberFormat::kBfloat16:
      return float_of_bfloat16(static_cast<std::uint16_t>(pattern));
    case NumberFormat::kFloat16:
      return float_of_float16(static_cast<std::uint16_t>(pattern));
    default:
      return std::bit_cast<float>(pattern);
  }
}

inline std::uint32_t pattern_of(NumberFormat format, float value) {
  switch (format) {
    case NumberFormat::kBfloat16:
      return truncated_to_bfloat16(value);
    case NumberFormat::kFloat16:
      return float16_of(value);
    default:
      return std::bit_cast<std::uint32_t>(value);
  }
}

inline Memory memory_of(NumberFormat format, const std::vector<float>& values) {
  Memory memory(values.size() * static_cast<std::size_t>(bytes_of(format)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    set_pattern(format, memory, static_cast<std::int64_t>(i), pattern_of(format, values[i]));
  }
  return memory;
}

inline Memory compressed(const Quantizer& quantizer, Choice choice, const Memory& numbers, InstructionSet instructions,
                         int threads = 1) {
  const auto count = static_cast<std::int64_t>(numbers.size()) / bytes_of(quantizer.format);
  Memory stream(static_cast<std::size_t>(most_bytes(quantizer.format, count)), 0xAB);
  ThreadPool pool(threads);
  stream.resize(
      static_cast<std::size_t>(compress(quantizer, choice, numbers.data(), count, stream.data(), pool, instructions)));
  return stream;
}

inline Memory restored(const Memory& stream, InstructionSet instructions, int threads = 1) {
  const StreamHeader header = header_of(stream);
  constexpr std::size_t kGuard = 256;
  const auto bytes = static_cast<std::size_t>(header.count * bytes_of(header.format));
  Memory numbers(bytes + kGuard, 0xCD);
  ThreadPool pool(threads);
  decompress(stream, numbers.data(), pool, instructions);
  for (std::size_t i = bytes; i < numbers.size(); ++i) {
    if (numbers[i] != 0xCD) {
      throw std::logic_error("written behind the end");
    }
  }
  numbers.resize(bytes);
  return numbers;
}

/// Counts the restored numbers that violate the bound.
inline std::int64_t violations(const Quantizer& quantizer, const Memory& before, const Memory& after) {
  const auto count = static_cast<std::int64_t>(before.size()) / bytes_of(quantizer.format);
  std::int64_t bad = before.size() == after.size() ? 0 : 1;
  for (std::int64_t i = 0; i < count && bad == 0; ++i) {
    const std::uint32_t old = pattern_at(quantizer.format, before, i);
    const std::uint32_t now = pattern_at(quantizer.format, after, i);
    const float x = number_of(quantizer.format, old);
    const float y = number_of(quantizer.format, now);
    if (!std::isfinite(x) || (x == 0 && std::signbit(x))) {
      bad += old != now;
      continue;
    }
    const double error = std::fabs(static_cast<double>(x) - static_cast<double>(y));
    bad += !(error <= static_cast<double>(quantizer.bound));
    if (quantizer.keep_signs) {
      bad += (x > 0) != (y > 0) || (x < 0) != (y < 0);
    }
  }
  return bad;
}

}  // namespace hydra::codec::test
