// Conversions between fp32 and the 16-bit formats, as integer operations: the same bits on every machine and GPU.
#pragma once

#include <bit>
#include <cstdint>

namespace hydra {

constexpr float float_of_bfloat16(std::uint16_t half) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
}

/// Returns the upper half of the bits: exact for a number that bf16 can represent.
constexpr std::uint16_t truncated_to_bfloat16(float value) noexcept {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

constexpr float float_of_float16(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinite, NaN
    return std::bit_cast<float>(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13);
  }
  if (magnitude >= 0x400U) {
    return std::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
  }
  const float denormal = static_cast<float>(magnitude) * 0x1p-24F;  // exact
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(denormal));
}

/// Rounds to nearest, ties to even. A NaN becomes the quiet NaN of its sign.
constexpr std::uint16_t float16_of(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits & 0x80000000U) >> 16;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U;
  } else if (magnitude >= 0x477FF000U) {  // rounds to 2^16 or more
    half = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // normal: round away the lowest 13 bits
    const std::uint32_t even = (magnitude >> 13) & 1U;
    half = (magnitude - (112U << 23) + 0xFFFU + even) >> 13;
  } else {  // denormal: the addition rounds at fp16's last place
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - std::bit_cast<std::uint32_t>(0.5F);
  }
  return static_cast<std::uint16_t>(sign | half);
}

}  // namespace hydra
