// One number at a time, in plain C++: what every machine runs, the end of every range, and the definition of the bits
// that the other instruction sets have to give.
#include <bit>
#include <cmath>
#include <cstdint>
#include <variant>

#include "csrc/optim/kernels.h"

namespace hydra {

namespace portable {

#define HYDRA_INLINE inline
#define HYDRA_KERNEL static

namespace {

constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kInfinity = 0x7F800000U;
constexpr std::uint32_t kQuietNan = 0x7FC00000U;

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
bool is_nan(std::uint32_t bits) { return (bits & ~kSign) > kInfinity; }
std::uint32_t quiet(std::uint32_t bits) { return is_nan(bits) ? (bits & kSign) | kQuietNan : bits; }

float from_float16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinite, NaN
    return std::bit_cast<float>(sign | kInfinity | (magnitude & 0x3FFU) << 13);
  }
  if (magnitude >= 0x400U) {
    return std::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
  }
  const float denormal = static_cast<float>(magnitude) * 0x1p-24F;  // exact
  return std::bit_cast<float>(sign | bits_of(denormal));
}

std::uint16_t to_float16_bits(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits & kSign) >> 16;
  const std::uint32_t magnitude = bits & ~kSign;
  std::uint32_t half;
  if (magnitude > kInfinity) {
    half = 0x7E00U;
  } else if (magnitude >= 0x477FF000U) {  // rounds to 2^16 or more
    half = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // normal: round the 13 bits that go
    const std::uint32_t even = (magnitude >> 13) & 1U;
    half = (magnitude - (112U << 23) + 0xFFFU + even) >> 13;
  } else {  // denormal: the addition rounds at the last place of a half
    half = bits_of(std::bit_cast<float>(magnitude) + 0.5F) - bits_of(0.5F);
  }
  return static_cast<std::uint16_t>(sign | half);
}

struct Vector {
  static constexpr std::int64_t kWidth = 1;
  using Float = float;
  using Bits = std::uint32_t;

  static Float broadcast(float value) { return value; }
  static Float add(Float a, Float b) { return a + b; }
  static Float sub(Float a, Float b) { return a - b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float div(Float a, Float b) { return a / b; }
  static Float sqrt(Float a) { return std::sqrt(a); }

  static Float load(const float* from) { return *from; }
  static void store(float* to, Float value) { *to = value; }
  static Float load_bfloat16(const std::uint16_t* from) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(*from) << 16);
  }
  static Float load_float16(const std::uint16_t* from) { return from_float16(*from); }
  static void store_float16(std::uint16_t* to, Float value) { *to = to_float16_bits(value); }

  /// To nearest even, and back.
  static Float to_bfloat16(Float value) {
    const std::uint32_t bits = bits_of(value);
    if (is_nan(bits)) {
      return std::bit_cast<float>(quiet(bits));
    }
    return std::bit_cast<float>((bits + 0x7FFFU + ((bits >> 16) & 1U)) & 0xFFFF0000U);
  }
  static Float to_float16(Float value) { return from_float16(to_float16_bits(value)); }

  static void store_bfloat16_half_up(std::uint16_t* to, Float value) {
    *to = static_cast<std::uint16_t>((quiet(bits_of(value)) + 0x8000U) >> 16);
  }

  /// [Note: split] The upper half is the number rounded half-up, the lower half what is to be added to it, signed.
  /// Ties go up, so that the lower half is -2^15 ... 2^15 - 1: with ties to even one pattern in 2^17 would not fit.
  static Float load_split(const std::uint16_t* upper, const std::int16_t* lower) {
    return std::bit_cast<float>((static_cast<std::uint32_t>(*upper) << 16) + static_cast<std::uint32_t>(*lower));
  }
  static void store_split(std::uint16_t* upper, std::int16_t* lower, Float value) {
    const std::uint32_t bits = quiet(bits_of(value));
    *upper = static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
    *lower = static_cast<std::int16_t>(bits & 0xFFFFU);
  }

  /// `random`: 16 bits. What has no fraction to round, infinity, stays.
  static void store_bfloat16_random(std::uint16_t* to, Float value, Bits random) {
    const std::uint32_t bits = quiet(bits_of(value));
    const bool finite = (bits & kInfinity) != kInfinity;
    *to = static_cast<std::uint16_t>((bits + (finite ? random : 0U)) >> 16);
  }
  static Bits hash(std::uint32_t counter) {
    std::uint32_t mixed = counter * 0x9E3779B1U;
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77U;
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE3DU;
    return mixed ^ (mixed >> 16);
  }
  static Bits lower_half(Bits random) { return random & 0xFFFFU; }
  static Bits upper_half(Bits random) { return random >> 16; }
};

#include "csrc/optim/kernel_frame.h"

void update(const ParameterUpdate& what, std::int64_t begin, std::int64_t end, float scale) noexcept {
  run_vectors(what, begin, end, scale);
}

float number(const void* data, NumberFormat format, std::int64_t at) {
  switch (format) {
    case NumberFormat::kFloat32:
      return static_cast<const float*>(data)[at];
    case NumberFormat::kBfloat16:
      return Vector::load_bfloat16(static_cast<const std::uint16_t*>(data) + at);
    default:
      return Vector::load_float16(static_cast<const std::uint16_t*>(data) + at);
  }
}

void add_squares(const void* data, NumberFormat format, std::int64_t count, double* lanes) noexcept {
  for (std::int64_t at = 0; at < count; ++at) {
    const double value = number(data, format, at);
    lanes[at % kNormLanes] += value * value;  // the product is exact, so fusing would change nothing
  }
}

}  // namespace

}  // namespace portable

const Kernels kPortableKernels = {.update = &portable::update, .add_squares = &portable::add_squares};

}  // namespace hydra
