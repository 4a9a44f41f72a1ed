#include "csrc/base/errors.h"

#include <gtest/gtest.h>

namespace hydra {
namespace {

TEST(HumanBytes, NamesTheUnitAndTheExactCount) {
  EXPECT_EQ(human_bytes(17), "17 bytes");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB (1536 bytes)");
  EXPECT_EQ(human_bytes(3 * kMiB), "3.00 MiB (3145728 bytes)");
}

TEST(Expect, BuildsItsMessageOnlyWhenItThrows) {
  int built = 0;
  const auto message = [&built] {
    ++built;
    return std::string("said so");
  };
  EXPECT_NO_THROW(HYDRA_EXPECT(true, StateError, message()));
  EXPECT_EQ(built, 0);
  EXPECT_THROW(HYDRA_EXPECT(false, StateError, message()), StateError);
  EXPECT_EQ(built, 1);
}

}  // namespace
}  // namespace hydra
