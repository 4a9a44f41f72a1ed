// The words that every layer uses, and their types. All are plain values.
//
//   block     a module whose parameters move together
//   page      one paged storage of a device parameter; a block's pages live in one slot
//   slot      device memory a block lands in, every page at its own 512-byte aligned offset
//   arena     exact-size host memory, pinned under CUDA
//   lane      one direction of transfer, served in order within a priority class
//   ticket    completion of one asynchronous operation; carries bytes, seconds, error
//   fence     a position in the device's compute order that a lane can wait for
//   version   one copy of a block's weights; plain training knows version 0 only
//   pass      what one window runs: a forward or a backward
//
// Unless another unit is named, sizes are bytes in `Bytes` and times are seconds in `double`.
#pragma once

#include <cstdint>

namespace hydra {

using Bytes = std::int64_t;

inline constexpr Bytes kKiB = 1024;
inline constexpr Bytes kMiB = 1024 * kKiB;

/// Every page starts at a multiple of this, in the slot and in the arena. Matrix libraries choose
/// their algorithm by alignment up to 256 bytes, and with equal layouts a block is one copy.
inline constexpr Bytes kPageAlignment = 512;

constexpr Bytes round_up(Bytes value, Bytes multiple) noexcept { return (value + multiple - 1) / multiple * multiple; }

/// The kind of a pass. The pager expects passes of one kind to run the same blocks.
enum class PassKind : std::uint8_t { kForward, kBackward, kInference };

}  // namespace hydra
