// The formats of numbers in memory, and their sizes in bytes.
#pragma once

#include <cstdint>

namespace hydra {

enum class NumberFormat : std::uint8_t { kFloat32, kBfloat16, kFloat16 };

constexpr std::int64_t bytes_of(NumberFormat format) noexcept { return format == NumberFormat::kFloat32 ? 4 : 2; }

}  // namespace hydra
