// The guarantee for every number: it is within the bound, or bit for bit itself, with every instruction set.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "csrc/codec/kernels/kernels.h"
#include "tests/cpp/codec/contents.h"
#include "tests/cpp/codec/support.h"

namespace hydra::codec {
namespace {

using test::Memory;

constexpr std::array kBounds = {1e-30F, 1e-6F, 1e-3F, 0.37F, 12.0F, 1e30F};

class Patterns {
 public:
  std::uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<std::uint32_t>(state_ >> 16);
  }

 private:
  std::uint64_t state_ = 88172645463325252ULL;
};

void expect_kept(const Quantizer& quantizer, Choice choice, const Memory& numbers) {
  const Memory stream = test::compressed(quantizer, choice, numbers, InstructionSet::kPortable);
  const Memory back = test::restored(stream, InstructionSet::kPortable);
  ASSERT_EQ(test::violations(quantizer, numbers, back), 0) << quantizer.bound;
  for (const InstructionSet instructions : supported_instruction_sets()) {
    if (instructions != InstructionSet::kPortable) {
      ASSERT_TRUE(test::compressed(quantizer, choice, numbers, instructions) == stream) << quantizer.bound;
      ASSERT_TRUE(test::restored(stream, instructions) == back) << quantizer.bound;
    }
  }
}

enum class Place { kEverywhere, kInRange, kOnePerBlock };

/// `patterns` random patterns of fp32: any patterns; numbers that the bound can quantise; or each alone in a block,
/// among zeros and small numbers in turn.
Memory numbers_of(const Quantizer& quantizer, Place place, std::int64_t patterns, Patterns& random) {
  const bool alone = place == Place::kOnePerBlock;
  Memory numbers(static_cast<std::size_t>(patterns * (alone ? 4 * kBlockNumbers : 4)));
  const std::uint32_t limit = std::bit_cast<std::uint32_t>(quantizer.limit);
  for (std::int64_t i = 0; i < patterns; ++i) {
    std::uint32_t pattern = random.next();
    if (place == Place::kInRange) {
      pattern = (pattern & 0x80000000U) | (pattern & 0x7FFFFFFFU) % limit;
    }
    if (alone && i % 2 == 0) {
      for (int other = 0; other < kBlockNumbers; ++other) {
        const float small = static_cast<float>(static_cast<int>(random.next() % 64) - 32) * quantizer.bound;
        test::set_pattern(quantizer.format, numbers, i * kBlockNumbers + other, std::bit_cast<std::uint32_t>(small));
      }
    }
    test::set_pattern(quantizer.format, numbers, alone ? i * kBlockNumbers + random.next() % kBlockNumbers : i,
                      pattern);
  }
  return numbers;
}

/// Checks `patterns` random patterns, and as many in range, for each bound; alone in a block, for all bounds together.
void try_patterns(std::int64_t patterns) {
  constexpr std::int64_t kPiece = 1 << 16;
  Patterns random;
  for (std::size_t bound = 0; bound < kBounds.size(); ++bound) {
    const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, kBounds[bound], bound % 2 == 1);
    for (const Place place : {Place::kEverywhere, Place::kInRange, Place::kOnePerBlock}) {
      const std::int64_t share = place == Place::kOnePerBlock ? std::ssize(kBounds) : 1;
      for (std::int64_t done = 0; done < patterns / share; done += kPiece) {
        const std::int64_t piece = std::min(kPiece, patterns / share - done);
        const Choice choice = done / kPiece % 4 == 3 ? Choice::kSigned : Choice::kShortest;
        ASSERT_NO_FATAL_FAILURE(expect_kept(quantizer, choice, numbers_of(quantizer, place, piece, random)));
      }
    }
  }
}

TEST(CodecGuarantee, RandomPatternsOfFloat32) { try_patterns(300'000); }

// Takes minutes: hydra_tests --gtest_also_run_disabled_tests --gtest_filter='CodecGuarantee.*'
TEST(CodecGuarantee, DISABLED_HundredMillionPatternsOfFloat32) { try_patterns(100'000'000); }

/// Blocks around every change of width, mode and sign, made from their quanta.
TEST(CodecGuarantee, BlocksAtEveryBorder) {
  for (const NumberFormat format : test::kFormats) {
    const Quantizer quantizer = Quantizer::make(format, format == NumberFormat::kFloat16 ? 0.5F : 4.0F, false);
    std::vector<float> values;
    Patterns random;
    for (int width = 0; width <= 15; ++width) {
      for (const int beyond : {-1, 0, 1}) {
        const int largest = std::min((1 << width) + beyond, kMostQuantum);
        for (const int base : {0, 1, -1, 100, -20'000, kMostQuantum - largest, largest - kMostQuantum}) {
          for (int count = 0; count <= kBlockNumbers; ++count) {
            for (int i = 0; i < kBlockNumbers; ++i) {
              const int place = (i * 11 + count) % kBlockNumbers;
              const int quantum = place >= count ? 0
                                  : place == 0   ? largest
                                                 : static_cast<int>(random.next() % 256) % (largest + 1);
              const int sign = count % 3 == 0 && i % 2 == 1 ? -1 : 1;
              values.push_back(static_cast<float>(std::clamp(base + sign * quantum, -kMostQuantum, kMostQuantum)) *
                               quantizer.step);
            }
          }
        }
      }
    }
    const Memory numbers = test::memory_of(format, values);
    for (const Choice choice : test::kChoices) {
      ASSERT_NO_FATAL_FAILURE(expect_kept(quantizer, choice, numbers));
    }
  }
}

/// Halfway points between multiples, the largest and the smallest quantised numbers, and the neighbours of each.
TEST(CodecGuarantee, NumbersAtEveryBorder) {
  for (const float bound : kBounds) {
    for (const bool keep_signs : {false, true}) {
      const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, bound, keep_signs);
      std::vector<float> values;
      for (const float about :
           {0.5F, 1.0F, 1.5F, 2.5F, 127.5F, 255.5F, 256.0F, 4095.5F, 16384.5F, 32766.0F, 32766.5F}) {
        values.push_back(about * quantizer.step);
      }
      values.insert(values.end(), {quantizer.limit, bound, 0.0F, 0x1p-149F, 0x1p-126F});
      Memory numbers;
      for (const float value : values) {
        for (int away = -3; away <= 3; ++away) {
          for (const std::uint32_t sign : {0U, 0x80000000U}) {
            const std::uint32_t pattern = std::bit_cast<std::uint32_t>(value) + static_cast<std::uint32_t>(away);
            Memory block(4 * kBlockNumbers);
            test::set_pattern(NumberFormat::kFloat32, block, away + 3, (pattern & 0x7FFFFFFFU) | sign);
            test::set_pattern(NumberFormat::kFloat32, block, 20, sign);
            numbers.insert(numbers.end(), block.begin(), block.end());
          }
        }
      }
      for (const Choice choice : test::kChoices) {
        ASSERT_NO_FATAL_FAILURE(expect_kept(quantizer, choice, numbers));
      }
    }
  }
}

}  // namespace
}  // namespace hydra::codec
