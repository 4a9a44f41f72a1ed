#include "csrc/io/checksum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/cpp/support.h"

namespace hydra {
namespace {

TEST(Checksum, IsThatOfTheStandard) {
  // RFC 3720, appendix B.4.
  std::vector<std::uint8_t> bytes(32, 0);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x8a9136aaU);
  std::fill(bytes.begin(), bytes.end(), std::uint8_t{0xff});
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x62a8ab43U);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(i);
  }
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x46dd794eU);
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283U);
  EXPECT_EQ(crc32c(nullptr, 0), 0U);
}

TEST(Checksum, IsTheSameFromAllInstructionsAtAllLengthsAndPlaces) {
  const std::vector<std::uint8_t> bytes = test::random_bytes(70'000, 3);
  for (const Bytes length : {1, 7, 8, 9, 63, 4095, 4096, 12287, 12288, 12289, 24576, 36871, 65536}) {
    for (const Bytes begin : {0, 1, 5, 8}) {
      EXPECT_EQ(crc32c(bytes.data() + begin, length), crc32c_portable(bytes.data() + begin, length))
          << length << " from " << begin;
    }
  }
}

TEST(Checksum, GoesOnFromWhatCameBefore) {
  const std::vector<std::uint8_t> bytes = test::random_bytes(50'000, 4);
  const std::uint32_t whole = crc32c(bytes.data(), 50'000);
  for (const Bytes cut : {1, 100, 12288, 30'001, 49'999}) {
    EXPECT_EQ(crc32c(bytes.data() + cut, 50'000 - cut, crc32c(bytes.data(), cut)), whole);
    EXPECT_EQ(crc32c_portable(bytes.data() + cut, 50'000 - cut, crc32c_portable(bytes.data(), cut)), whole);
  }
}

TEST(Checksum, NoticesEveryBit) {
  std::vector<std::uint8_t> bytes = test::random_bytes(12288 + 9, 5);
  const std::uint32_t whole = crc32c(bytes.data(), static_cast<Bytes>(bytes.size()));
  for (std::size_t place = 0; place < bytes.size(); place += 97) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[place] ^= static_cast<std::uint8_t>(1 << bit);
      EXPECT_NE(crc32c(bytes.data(), static_cast<Bytes>(bytes.size())), whole);
      bytes[place] ^= static_cast<std::uint8_t>(1 << bit);
    }
  }
}

}  // namespace
}  // namespace hydra
