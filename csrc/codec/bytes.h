// Reads and writes numbers at any address, aligned or not, in the machine's byte order.
#pragma once

#include <cstdint>
#include <cstring>

namespace hydra::codec {

/// Writes `value` and returns the address behind it.
template <class T>
inline std::uint8_t* put(std::uint8_t* to, T value) noexcept {
  std::memcpy(to, &value, sizeof value);
  return to + sizeof value;
}

template <class T>
inline T get(const std::uint8_t* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace hydra::codec
