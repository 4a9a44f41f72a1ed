#include "csrc/base/errors.h"

#include <array>
#include <cstdio>

namespace hydra {

std::string human_bytes(Bytes bytes) {
  constexpr std::array<const char*, 5> kUnits = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < kKiB && bytes > -kKiB) {
    return std::to_string(bytes) + " bytes";
  }
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (unit + 1 < kUnits.size() && (value >= 1024.0 || value <= -1024.0)) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f %s", value, kUnits[unit]);
  return std::string(text.data()) + " (" + std::to_string(bytes) + " bytes)";
}

}  // namespace hydra
