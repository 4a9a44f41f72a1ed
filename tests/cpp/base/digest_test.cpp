#include "csrc/base/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace hydra {
namespace {

std::uint64_t digest_of(const std::string& text) {
  Digest digest;
  digest.add(text.data(), static_cast<Bytes>(text.size()));
  return digest.value();
}

TEST(Digest, KnownValues) {
  EXPECT_EQ(digest_of(""), 0xEF46DB3751D8E999ULL);
  EXPECT_EQ(digest_of("a"), 0xD24EC4F1A98C6E5BULL);
  EXPECT_EQ(digest_of("abc"), 0x44BC2CF5AD770999ULL);
  EXPECT_EQ(digest_of("as often as it is called, and not once more than that"), 0xD0605B7C4BF63407ULL);
}

TEST(Digest, CutsChangeNothing) {
  std::string text;
  for (int i = 0; i < 150; ++i) {
    text.push_back(static_cast<char>(i * 37));
  }
  for (std::size_t first = 0; first <= text.size(); ++first) {
    for (std::size_t second = first; second <= text.size(); second += 7) {
      Digest digest;
      digest.add(text.data(), static_cast<Bytes>(first));
      digest.add(text.data() + first, static_cast<Bytes>(second - first));
      digest.add(text.data() + second, static_cast<Bytes>(text.size() - second));
      ASSERT_EQ(digest.value(), digest_of(text)) << first << " " << second;
    }
  }
}

TEST(Digest, EveryByteAndItsPlaceCount) {
  const std::string text(100, 'x');
  std::vector<std::uint64_t> found{digest_of(text), digest_of(text + 'x')};
  for (std::size_t place = 0; place < text.size(); ++place) {
    std::string other = text;
    other[place] = 'y';
    found.push_back(digest_of(other));
  }
  std::sort(found.begin(), found.end());
  EXPECT_EQ(std::adjacent_find(found.begin(), found.end()), found.end());
}

}  // namespace
}  // namespace hydra
