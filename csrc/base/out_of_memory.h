// What Python's users read first when a device has no memory left.
#pragma once

namespace hydra {

/// Tools that look for a batch size that fits ask for " out of memory.".
inline constexpr const char* kOutOfMemory = "hydra_ext is out of memory. ";

}  // namespace hydra
