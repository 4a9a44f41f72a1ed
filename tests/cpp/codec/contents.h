// Arrays of numbers that tests of the codec compress.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "csrc/base/number_format.h"
#include "csrc/codec/block.h"

namespace hydra::codec::test {

inline constexpr std::array kFormats = {NumberFormat::kFloat32, NumberFormat::kBfloat16, NumberFormat::kFloat16};
inline constexpr std::array kChoices = {Choice::kShortest, Choice::kSigned};
/// Normal numbers; normal numbers after a ReLU; numbers around an offset; smooth, equal, and rare special numbers.
inline std::vector<std::vector<float>> contents(std::size_t count) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<std::vector<float>> all(7, std::vector<float>(count));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    all[0][i] = value;
    all[1][i] = std::max(value, 0.0F);
    all[2][i] = 40.0F + value / 8;
    all[3][i] = std::sin(static_cast<float>(i) / 700.0F);
    all[4][i] = -3.25F;
    all[5][i] = i % 97 == 5 ? -0.0F : i % 331 == 7 ? INFINITY : i % 331 == 8 ? -NAN : value * 1e-3F;
    all[6][i] = i % 11 == 0 ? value * 1e4F : 0.0F;
  }
  return all;
}

}  // namespace hydra::codec::test
