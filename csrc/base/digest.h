// XXH64 (Yann Collet): a 64-bit hash of a sequence of bytes. It detects accidents, not attacks.
//
// The hash is the same on every machine of the same byte order, and does not depend on how calls divide the bytes.
// Not thread-safe: one thread uses a Digest at a time.
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
  /// Returns the hash of all bytes added so far. More bytes may be added afterwards.
  [[nodiscard]] std::uint64_t value() const noexcept;

 private:
  static constexpr std::size_t kStripe = 32;

  std::array<std::uint64_t, 4> lanes_;
  std::array<std::uint8_t, kStripe> rest_{};  // bytes after the last full stripe
  std::uint64_t bytes_ = 0;
};

}  // namespace hydra
