// A vector of one number in plain C++. It defines the bits that all instruction sets have to give.
//
// A kernels_*.cpp, or the CUDA kernels, include this file inside a namespace of their own: after they have defined
// HYDRA_INLINE and included csrc/base/half.h, and before kernel_frame.h. The file has no include guard on purpose.
// Compiled without fused multiply-adds, and with correctly rounded divisions and square roots.

constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kInfinity = 0x7F800000U;
constexpr std::uint32_t kQuietNan = 0x7FC00000U;

HYDRA_INLINE std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
HYDRA_INLINE bool is_nan(std::uint32_t bits) { return (bits & ~kSign) > kInfinity; }
HYDRA_INLINE std::uint32_t quiet(std::uint32_t bits) { return is_nan(bits) ? (bits & kSign) | kQuietNan : bits; }

struct Vector {
  static constexpr std::int64_t kWidth = 1;
  using Float = float;
  using Bits = std::uint32_t;

  HYDRA_INLINE static Float broadcast(float value) { return value; }
  HYDRA_INLINE static Float add(Float a, Float b) { return a + b; }
  HYDRA_INLINE static Float sub(Float a, Float b) { return a - b; }
  HYDRA_INLINE static Float mul(Float a, Float b) { return a * b; }
  HYDRA_INLINE static Float div(Float a, Float b) { return a / b; }
  HYDRA_INLINE static Float sqrt(Float a) { return std::sqrt(a); }

  HYDRA_INLINE static Float load(const float* from) { return *from; }
  HYDRA_INLINE static void store(float* to, Float value) { *to = value; }
  HYDRA_INLINE static Float load_bfloat16(const std::uint16_t* from) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(*from) << 16);
  }
  HYDRA_INLINE static Float load_float16(const std::uint16_t* from) { return float_of_float16(*from); }
  HYDRA_INLINE static void store_float16(std::uint16_t* to, Float value) { *to = float16_of(value); }

  /// Rounds to bf16, to nearest even, and converts back.
  HYDRA_INLINE static Float to_bfloat16(Float value) {
    const std::uint32_t bits = bits_of(value);
    if (is_nan(bits)) {
      return std::bit_cast<float>(quiet(bits));
    }
    return std::bit_cast<float>((bits + 0x7FFFU + ((bits >> 16) & 1U)) & 0xFFFF0000U);
  }
  HYDRA_INLINE static Float to_float16(Float value) { return float_of_float16(float16_of(value)); }

  HYDRA_INLINE static void store_bfloat16_half_up(std::uint16_t* to, Float value) {
    *to = static_cast<std::uint16_t>((quiet(bits_of(value)) + 0x8000U) >> 16);
  }

  /// [Note: split] The upper half is the number rounded half-up. The lower half is the signed difference to it.
  /// Ties go up, so that the lower half is in -2^15 ... 2^15 - 1. With ties to even, one pattern in 2^17 would not fit.
  HYDRA_INLINE static Float load_split(const std::uint16_t* upper, const std::int16_t* lower) {
    return std::bit_cast<float>((static_cast<std::uint32_t>(*upper) << 16) + static_cast<std::uint32_t>(*lower));
  }
  HYDRA_INLINE static void store_split(std::uint16_t* upper, std::int16_t* lower, Float value) {
    const std::uint32_t bits = quiet(bits_of(value));
    *upper = static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
    *lower = static_cast<std::int16_t>(bits & 0xFFFFU);
  }

  /// `random` has 16 bits. Infinity has no fraction to round, and stays.
  HYDRA_INLINE static void store_bfloat16_random(std::uint16_t* to, Float value, Bits random) {
    const std::uint32_t bits = quiet(bits_of(value));
    const bool finite = (bits & kInfinity) != kInfinity;
    *to = static_cast<std::uint16_t>((bits + (finite ? random : 0U)) >> 16);
  }
  HYDRA_INLINE static Bits hash(std::uint32_t counter) {
    std::uint32_t mixed = counter * 0x9E3779B1U;
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77U;
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE3DU;
    return mixed ^ (mixed >> 16);
  }
  HYDRA_INLINE static Bits lower_half(Bits random) { return random & 0xFFFFU; }
  HYDRA_INLINE static Bits upper_half(Bits random) { return random >> 16; }
};

HYDRA_INLINE float number(const void* data, NumberFormat format, std::int64_t at) {
  switch (format) {
    case NumberFormat::kFloat32:
      return static_cast<const float*>(data)[at];
    case NumberFormat::kBfloat16:
      return Vector::load_bfloat16(static_cast<const std::uint16_t*>(data) + at);
    default:
      return Vector::load_float16(static_cast<const std::uint16_t*>(data) + at);
  }
}
