// A sum over numbers, each mixed with its place: it changes if a number changes, or if two change places.
//
// Numbers are taken as signed integers of their size. Sums wrap, so the order does not matter. It detects accidents,
// not attacks.
#pragma once

#include <cstdint>

namespace hydra {

// Odd numbers without a pattern, taken from XXH64.
inline constexpr std::uint64_t kPlaceFactor1 = 0x9E3779B185EBCA87ULL;
inline constexpr std::uint64_t kPlaceFactor2 = 0xC2B2AE3D27D4EB4FULL;
inline constexpr std::uint64_t kPlaceFactor3 = 0x165667B19E3779F9ULL;
inline constexpr int kPlaceShift1 = 29;  // of a signed number, as the next one
inline constexpr int kPlaceShift2 = 32;

}  // namespace hydra
