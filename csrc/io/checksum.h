// CRC-32C (Castagnoli), as RFC 3720 has it: of what lies on a disk. The same number from every instruction set.
#pragma once

#include <cstdint>

#include "csrc/base/types.h"

namespace hydra {

/// Of the bytes, after those whose checksum was `before`.
std::uint32_t crc32c(const void* data, Bytes bytes, std::uint32_t before = 0) noexcept;

/// Without special instructions.
std::uint32_t crc32c_portable(const void* data, Bytes bytes, std::uint32_t before = 0) noexcept;

}  // namespace hydra
