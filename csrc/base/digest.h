// XXH64 (Collet): 64 bits of a sequence of bytes, which depend on the place of each. Against chance, not against
// intent. The same number on every machine of the same byte order, however the bytes are cut into calls.
#pragma once

#include <array>
#include <cstdint>

#include "csrc/base/types.h"

namespace hydra {

class Digest {
 public:
  Digest() noexcept;
  void add(const void* data, Bytes bytes) noexcept;
  void add(std::uint64_t number) noexcept { add(&number, sizeof number); }
  /// Of all that was added so far.
  [[nodiscard]] std::uint64_t value() const noexcept;

 private:
  static constexpr std::size_t kStripe = 32;

  std::array<std::uint64_t, 4> lanes_;
  std::array<std::uint8_t, kStripe> rest_{};  // what makes no stripe yet
  std::uint64_t bytes_ = 0;
};

}  // namespace hydra
