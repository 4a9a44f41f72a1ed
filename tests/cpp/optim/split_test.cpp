// The split master: the number that it represents, with the kernels of every instruction set.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "csrc/optim/parameter_update.h"

namespace hydra {
namespace {

constexpr std::int64_t kBlock = 1 << 16;

bool is_nan(std::uint32_t bits) { return (bits & 0x7FFFFFFFU) > 0x7F800000U; }

/// Writes and reads fp32 numbers: SGD with a rate of -1 adds a gradient to zero, and then adds zero to the result.
class Split {
 public:
  explicit Split(InstructionSet instructions) : instructions_(instructions) {}

  void store(const std::vector<float>& numbers) {
    upper.assign(numbers.size(), 0);
    lower.assign(numbers.size(), 0);
    add(numbers);
  }

  void add(const std::vector<float>& numbers) {
    ParameterUpdate update{.step = SgdStep::make({-1.0, 0.0, 0.0, 0.0, false}, true)};
    update.count = static_cast<std::int64_t>(numbers.size());
    update.layout = WeightLayout::kSplit;
    update.weight_format = NumberFormat::kBfloat16;
    update.weights = upper.data();
    update.master = lower.data();
    update.gradient = numbers.data();
    run_update(update, 0, update.count, 1.0F, instructions_);
  }

  std::uint32_t merged(std::size_t i) const {
    return (static_cast<std::uint32_t>(upper[i]) << 16) + static_cast<std::uint32_t>(lower[i]);
  }

  std::vector<std::uint16_t> upper;
  std::vector<std::int16_t> lower;

 private:
  InstructionSet instructions_;
};

/// Describes what is wrong with a stored pattern; empty if it is right.
std::string fault_of(const Split& split, std::size_t i, std::uint32_t bits) {
  const std::uint32_t merged = split.merged(i);
  const std::uint32_t upper = static_cast<std::uint32_t>(split.upper[i]) << 16;
  if (is_nan(bits)) {
    const bool fine = is_nan(merged) && is_nan(upper) && merged >> 31 == bits >> 31 && upper >> 31 == bits >> 31;
    return fine ? "" : "is NaN no more";
  }
  if (merged != bits && (merged | bits) << 1 != 0) {  // 0 + -0 is 0
    return "became " + std::to_string(merged);
  }
  return upper == ((merged + 0x8000U) & 0xFFFF0000U) ? "" : "was not rounded half-up";
}

void round_trip(std::uint32_t stride) {
  for (const InstructionSet instructions : supported_instruction_sets()) {
    Split split(instructions);
    std::vector<float> numbers(kBlock);
    for (std::uint64_t first = 0; first < 1ULL << 32; first += stride * static_cast<std::uint64_t>(kBlock)) {
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = std::bit_cast<float>(static_cast<std::uint32_t>(first + stride * i));
      }
      split.store(numbers);
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const auto bits = static_cast<std::uint32_t>(first + stride * i);
        const std::string fault = fault_of(split, i, bits);
        ASSERT_EQ(fault, "") << bits << " with instruction set " << static_cast<int>(instructions);
      }
    }
  }
}

TEST(SplitMaster, EveryThousandthPatternIsThereAgain) { round_trip(1009); }

// Takes three minutes: hydra_tests --gtest_also_run_disabled_tests --gtest_filter='SplitMaster.*'
TEST(SplitMaster, DISABLED_EveryPatternIsThereAgain) { round_trip(1); }

TEST(SplitMaster, BordersAreThereAgain) {
  for (const InstructionSet instructions : supported_instruction_sets()) {
    Split split(instructions);
    std::vector<float> numbers;
    for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
      for (const std::uint32_t lower : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
        numbers.push_back(std::bit_cast<float>((upper << 16) | lower));
      }
    }
    split.store(numbers);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      ASSERT_EQ(fault_of(split, i, std::bit_cast<std::uint32_t>(numbers[i])), "");
    }
  }
}

TEST(SplitMaster, KeepsWhatTheWeightDoesNotShow) {
  Split split(best_instruction_set());
  split.store(std::vector<float>(20, 1.0F));
  for (int i = 0; i < 1000; ++i) {
    split.add(std::vector<float>(20, 1e-5F));  // a bf16 weight of 1 would never change
  }
  EXPECT_NEAR(std::bit_cast<float>(split.merged(3)), 1.01F, 1e-4F);
  EXPECT_EQ(split.upper[3], 0x3F81);
}

TEST(SplitMaster, InfinityIsItself) {
  Split split(best_instruction_set());
  split.store(std::vector<float>(17, -INFINITY));
  EXPECT_EQ(split.upper[16], 0xFF80);
  EXPECT_EQ(split.lower[16], 0);
}

}  // namespace
}  // namespace hydra
