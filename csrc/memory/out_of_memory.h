// The first words of the message that Python users read when a device is out of memory.
#pragma once

namespace hydra {

/// Tools that search for the largest batch size look for " out of memory." in the message.
inline constexpr const char* kOutOfMemory = "hydra_ext is out of memory. ";
/// Follows where room was made before the allocation failed.
inline constexpr const char* kNothingMore = "Nothing more can leave the device. ";

}  // namespace hydra
