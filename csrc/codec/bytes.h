// Numbers as bytes, wherever they lie.
#pragma once

#include <cstdint>
#include <cstring>

namespace hydra::codec {

/// Returns the place behind it.
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
