#include "csrc/optim/norm.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace hydra {
namespace {

std::vector<float> numbers(std::int64_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> made(static_cast<std::size_t>(count));
  for (float& value : made) {
    value = normal(random);
  }
  return made;
}

double sum_of(const std::vector<float>& values, ThreadPool& pool, InstructionSet instructions) {
  const NormInput input{values.data(), NumberFormat::kFloat32, static_cast<std::int64_t>(values.size())};
  double sum = -1.0;
  sums_of_squares({&input, 1}, {&sum, 1}, pool, instructions);
  return sum;
}

/// The definition in norm.h, written out.
double defined_sum(const std::vector<float>& values) {
  double sum = 0.0;
  for (std::size_t begin = 0; begin < values.size(); begin += kNormChunk) {
    std::vector<double> lanes(32, 0.0);
    const std::size_t end = std::min(values.size(), begin + kNormChunk);
    for (std::size_t i = begin; i < end; ++i) {
      lanes[(i - begin) % 32] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
    for (std::size_t half = 16; half > 0; half /= 2) {
      for (std::size_t lane = 0; lane < half; ++lane) {
        lanes[lane] += lanes[lane + half];
      }
    }
    sum += lanes[0];
  }
  return sum;
}

TEST(Norm, IsItsDefinitionToTheBitWhateverInstructionsAndThreads) {
  for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{31}, std::int64_t{32},
                                   std::int64_t{1000}, kNormChunk, kNormChunk + 1, 3 * kNormChunk + 77}) {
    const std::vector<float> values = numbers(count, 5);
    const double wanted = defined_sum(values);
    for (const InstructionSet instructions : supported_instruction_sets()) {
      for (const int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        EXPECT_EQ(sum_of(values, pool, instructions), wanted) << count << " numbers, " << threads << " threads";
      }
    }
  }
}

TEST(Norm, DependsOnWhereAChunkBegins) {
  // A definition without chunks must give another result here, or the test could not fail.
  const std::vector<float> values = numbers(2 * kNormChunk + 64, 5);
  ThreadPool pool(1);
  double straight = 0.0;
  for (const float value : values) {
    straight += static_cast<double>(value) * static_cast<double>(value);
  }
  EXPECT_NE(sum_of(values, pool, best_instruction_set()), straight);
  EXPECT_NEAR(sum_of(values, pool, best_instruction_set()), straight, 1e-9 * straight);
}

TEST(Norm, ShortFormatsCountAsTheNumbersTheyAre) {
  ThreadPool pool(1);
  std::vector<std::uint16_t> bits(1000);
  std::vector<float> as_bfloat16(bits.size());
  for (std::size_t i = 0; i < bits.size(); ++i) {
    bits[i] = static_cast<std::uint16_t>(0x3E00 + i);
    as_bfloat16[i] = std::bit_cast<float>(static_cast<std::uint32_t>(bits[i]) << 16);
  }
  const NormInput input{bits.data(), NumberFormat::kBfloat16, 1000};
  for (const InstructionSet instructions : supported_instruction_sets()) {
    double sum = 0.0;
    sums_of_squares({&input, 1}, {&sum, 1}, pool, instructions);
    EXPECT_EQ(sum, defined_sum(as_bfloat16));
  }
}

TEST(Norm, OfHalvesIsTheSameWithEveryInstructionSet) {
  std::vector<std::uint16_t> bits(0x7C00);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    bits[i] = static_cast<std::uint16_t>(i);
  }
  const double wanted = chunk_sum_of_squares(bits.data(), NumberFormat::kFloat16, 0x7C00, InstructionSet::kPortable);
  EXPECT_GT(wanted, 1e9);
  for (const InstructionSet instructions : supported_instruction_sets()) {
    EXPECT_EQ(chunk_sum_of_squares(bits.data(), NumberFormat::kFloat16, 0x7C00, instructions), wanted);
  }
}

TEST(Norm, TellsWhatIsNotFiniteAndNeverOverflowsByItself) {
  ThreadPool pool(2);
  std::vector<float> values(kNormChunk + 5, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(sum_of(values, pool, best_instruction_set())));
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    for (const std::size_t where : {std::size_t{0}, values.size() - 1}) {
      std::vector<float> spoiled = values;
      spoiled[where] = bad;
      for (const InstructionSet instructions : supported_instruction_sets()) {
        EXPECT_FALSE(std::isfinite(sum_of(spoiled, pool, instructions)));
      }
    }
  }
}

TEST(Norm, OfSeveralKeepsThemApart) {
  const std::vector<float> first = numbers(kNormChunk + 9, 1);
  const std::vector<float> second = numbers(40, 2);
  const std::vector<NormInput> inputs = {{first.data(), NumberFormat::kFloat32, kNormChunk + 9},
                                         {nullptr, NumberFormat::kFloat32, 0},
                                         {second.data(), NumberFormat::kFloat32, 40}};
  std::vector<double> sums(3, -1.0);
  ThreadPool pool(2);
  sums_of_squares(inputs, sums, pool);
  EXPECT_EQ(sums, (std::vector<double>{defined_sum(first), 0.0, defined_sum(second)}));
  EXPECT_EQ(norm_of_sums(sums), std::sqrt(sums[0] + sums[2]));
}

TEST(ClipFactor, IsOneBelowTheNormAndItsShareAbove) {
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0F);
  EXPECT_FLOAT_EQ(clip_factor(4.0, 1.0), 0.25F);
  EXPECT_EQ(clip_factor(INFINITY, 1.0), 0.0F);
  EXPECT_TRUE(std::isnan(clip_factor(NAN, 1.0)));
}

}  // namespace
}  // namespace hydra
