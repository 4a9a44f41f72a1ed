// CRC-32C (Castagnoli), as in RFC 3720: the checksum of bytes on a disk. Reentrant.
//
// Every instruction set gives the same number.
#pragma once

#include <cstdint>

#include "csrc/base/types.h"

namespace hydra {

/// Returns the checksum of the bytes, appended to bytes with the checksum `before`.
std::uint32_t crc32c(const void* data, Bytes bytes, std::uint32_t before = 0) noexcept;

/// Does the same without special instructions.
std::uint32_t crc32c_portable(const void* data, Bytes bytes, std::uint32_t before = 0) noexcept;

}  // namespace hydra
