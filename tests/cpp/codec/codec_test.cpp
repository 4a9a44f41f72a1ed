// The bound holds for every number, and special numbers are exact. All instruction sets write and read the same bytes,
// and damaged bytes are refused.
#include "csrc/codec/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "csrc/base/errors.h"
#include "tests/cpp/codec/contents.h"
#include "tests/cpp/codec/support.h"

namespace hydra::codec {
namespace {

using test::compressed;
using test::contents;
using test::kChoices;
using test::kFormats;
using test::Memory;
using test::memory_of;
using test::restored;
using test::violations;

constexpr std::array kCodecBounds = {0.0F, 1e-6F, 1e-3F, 0.01F, 0.3F, 2.0F, 1e5F};

void expect_kept(const Quantizer& quantizer, Choice choice, const Memory& numbers, const std::string& what) {
  const Memory stream = compressed(quantizer, choice, numbers, InstructionSet::kPortable);
  for (const InstructionSet instructions : supported_instruction_sets()) {
    ASSERT_EQ(compressed(quantizer, choice, numbers, instructions), stream) << what;
    const Memory back = restored(stream, instructions);
    ASSERT_EQ(violations(quantizer, numbers, back), 0) << what;
    ASSERT_EQ(back, restored(stream, InstructionSet::kPortable)) << what;
  }
}

TEST(Codec, KeepsToTheBoundAndAllInstructionSetsAgree) {
  for (const NumberFormat format : kFormats) {
    for (const bool keep_signs : {false, true}) {
      for (const float bound : kCodecBounds) {
        const Quantizer quantizer = Quantizer::make(format, bound, keep_signs);
        int content = 0;
        for (const std::vector<float>& values : contents(32 * 300 + 13)) {
          const Memory numbers = memory_of(format, values);
          for (const Choice choice : kChoices) {
            expect_kept(quantizer, choice, numbers,
                        "format " + std::to_string(static_cast<int>(format)) + ", signs " + std::to_string(keep_signs) +
                            ", bound " + std::to_string(bound) + ", content " + std::to_string(content) + ", choice " +
                            std::to_string(static_cast<int>(choice)));
          }
          ++content;
        }
      }
    }
  }
}

/// All patterns of 16 bits: in order, in random order, each alone among zeros, and rarely among normal numbers.
TEST(Codec, KeepsEveryPatternOfSixteenBits) {
  std::vector<std::uint32_t> patterns(1U << 16);
  std::iota(patterns.begin(), patterns.end(), 0U);
  std::vector<std::uint32_t> shuffled = patterns;
  std::mt19937 random(3);
  std::ranges::shuffle(shuffled, random);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    std::vector<Memory> memories(4);
    for (const std::uint32_t pattern : patterns) {
      for (int i = 0; i < 32; ++i) {
        const auto place = static_cast<std::int64_t>(memories[2].size()) / 2;
        memories[2].resize(memories[2].size() + 2);
        memories[3].resize(memories[3].size() + 2);
        const bool odd = i == static_cast<int>(pattern % 32);
        test::set_pattern(format, memories[2], place, odd ? pattern : 0);
        test::set_pattern(format, memories[3], place, odd ? pattern : test::pattern_of(format, normal(random)));
      }
    }
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      memories[0].resize(2 * i + 2);
      memories[1].resize(2 * i + 2);
      test::set_pattern(format, memories[0], static_cast<std::int64_t>(i), patterns[i]);
      test::set_pattern(format, memories[1], static_cast<std::int64_t>(i), shuffled[i]);
    }
    for (const bool keep_signs : {false, true}) {
      for (const float bound : {1e-30F, 1e-4F, 0.01F, 0.1F, 3.0F, 7e4F}) {
        const Quantizer quantizer = Quantizer::make(format, bound, keep_signs);
        for (const Memory& numbers : memories) {
          expect_kept(quantizer, Choice::kShortest, numbers, "bound " + std::to_string(bound));
        }
      }
    }
  }
}

TEST(Codec, IsTheSameForAnyNumberOfThreads) {
  const Memory numbers = memory_of(NumberFormat::kFloat32, contents(9 * 32768 + 45)[5]);
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.01F, false);
  const InstructionSet best = supported_instruction_sets().back();
  const Memory stream = compressed(quantizer, Choice::kShortest, numbers, best);
  for (const int threads : {2, 3}) {
    EXPECT_EQ(compressed(quantizer, Choice::kShortest, numbers, best, threads), stream);
    EXPECT_EQ(restored(stream, best, threads), restored(stream, best));
  }
}

TEST(Codec, TakesAnyCount) {
  const std::vector<float> values = contents(2 * 32768 + 200)[0];
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.05F, false);
  for (const std::size_t count : {0U, 1U, 31U, 32U, 33U, 1000U, 32767U, 32768U, 32769U, 65537U}) {
    const Memory numbers =
        memory_of(NumberFormat::kFloat32, {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)});
    expect_kept(quantizer, Choice::kShortest, numbers, std::to_string(count));
  }
}

TEST(Codec, TakesNothingForZerosAndLittleForWhatIsAlike) {
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.01F, false);
  const auto payload = [&](const std::vector<float>& values) {
    const Memory stream =
        compressed(quantizer, Choice::kShortest, memory_of(NumberFormat::kFloat32, values), InstructionSet::kPortable);
    return header_of(stream).payload_bytes;
  };
  EXPECT_EQ(payload(std::vector<float>(3200, 0.0F)), 0);
  EXPECT_EQ(payload(std::vector<float>(3200, 7.0F)), 2 * 100);
}

TEST(Codec, RefusesWhatIsNoBound) {
  for (const float bound : {-1.0F, NAN, INFINITY}) {
    EXPECT_THROW(Quantizer::make(NumberFormat::kFloat32, bound, false), InvalidBound);
  }
}

TEST(Codec, RefusesStreamsThatAreCutOff) {
  const Memory numbers = memory_of(NumberFormat::kFloat32, contents(70'000)[5]);
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.01F, false);
  const Memory stream = compressed(quantizer, Choice::kShortest, numbers, InstructionSet::kPortable);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{47}, std::size_t{48}, std::size_t{500}, stream.size() - 1}) {
    const Memory cut(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THROW(restored(cut, InstructionSet::kPortable), DamagedStream) << size;
  }
  Memory longer = stream;
  longer.push_back(0);
  EXPECT_THROW(restored(longer, InstructionSet::kPortable), DamagedStream);
}

/// No damage makes the decoder read or write other memory (AddressSanitizer runs this too).
TEST(Codec, ReadsDamagedStreamsSafely) {
  std::mt19937 random(11);
  int refused = 0;
  for (unsigned round = 0; round < 400; ++round) {
    const auto values = contents(1 + random() % 40'000)[round % 7];
    const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.02F, false);
    Memory stream =
        compressed(quantizer, Choice::kShortest, memory_of(NumberFormat::kFloat32, values), InstructionSet::kPortable);
    for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips) {
      const std::size_t from = round % 2 == 0 ? 0 : std::min<std::size_t>(48, stream.size() - 1);
      stream[from + random() % (stream.size() - from)] ^= static_cast<std::uint8_t>(1U << random() % 8);
    }
    for (const InstructionSet instructions : supported_instruction_sets()) {
      try {
        restored(stream, instructions);
      } catch (const DamagedStream&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace hydra::codec
