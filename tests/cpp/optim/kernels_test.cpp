// Every kind of update gives the same bits with every instruction set, thread, division and alignment.
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "tests/cpp/optim/support.h"

namespace hydra {
namespace {

using test::Content;
using test::Kind;
using test::Memory;

constexpr std::int64_t kElements = 16 * 40 + 7;

Memory fresh(const Kind& kind, Content content) { return {kind, kElements, 1, content, 7}; }

void run_steps(Memory& memory, float scale, InstructionSet instructions) {
  for (int step = 0; step < 3; ++step) {
    run_update(memory.update(), 0, kElements, scale, instructions);
  }
}

/// The definition of the bits: three steps with the portable kernel.
Memory expected(const Kind& kind, Content content, float scale) {
  Memory memory = fresh(kind, content);
  run_steps(memory, scale, InstructionSet::kPortable);
  return memory;
}

TEST(Update, OfEveryKindChangesSomething) {
  for (const Kind& kind : test::all_kinds()) {
    Memory memory = fresh(kind, Content::kNumbers);
    run_update(memory.update(), 0, kElements, 1.0F);
    EXPECT_GT(memory.differences(fresh(kind, Content::kNumbers)), kElements / 2) << kind.name;
  }
}

TEST(Update, OfNoElementsChangesNothing) {
  for (const Kind& kind : test::all_kinds()) {
    for (const InstructionSet instructions : supported_instruction_sets()) {
      Memory memory = fresh(kind, Content::kAnyBits);
      run_update(memory.update(), 20, 20, 0.3F, instructions);
      EXPECT_EQ(memory.differences(fresh(kind, Content::kAnyBits)), 0) << kind.name;
    }
  }
}

TEST(Update, IsTheSameWithEveryInstructionSet) {
  for (const Kind& kind : test::all_kinds()) {
    for (const Content content : {Content::kNumbers, Content::kAnyBits}) {
      for (const float scale : {1.0F, 0.3F}) {
        const Memory wanted = expected(kind, content, scale);
        for (const InstructionSet instructions : supported_instruction_sets()) {
          Memory memory = fresh(kind, content);
          run_steps(memory, scale, instructions);
          EXPECT_EQ(memory.differences(wanted), 0)
              << kind.name << ", instruction set " << static_cast<int>(instructions) << ", scale " << scale;
        }
      }
    }
  }
}

TEST(Update, IsTheSameInAnyRanges) {
  for (const Kind& kind : test::all_kinds()) {
    const Memory wanted = expected(kind, Content::kNumbers, 0.3F);
    for (const InstructionSet instructions : supported_instruction_sets()) {
      for (const std::int64_t length : {1, 5, 16, 33, 100}) {
        Memory memory = fresh(kind, Content::kNumbers);
        for (int step = 0; step < 3; ++step) {
          for (std::int64_t end = kElements; end > 0; end -= length) {  // last range first: order must not matter
            run_update(memory.update(), std::max<std::int64_t>(0, end - length), end, 0.3F, instructions);
          }
        }
        EXPECT_EQ(memory.differences(wanted), 0) << kind.name << ", " << length << " elements a range";
      }
    }
  }
}

/// Three steps, each from one buffer of weights to the other, which has the final weights.
void run_steps_between(Memory& memory, Memory& other, std::int64_t length, InstructionSet instructions) {
  void* const buffers[] = {memory.update().weights, other.update().weights};
  for (int step = 0; step < 3; ++step) {
    ParameterUpdate update = memory.update();
    update.weights = buffers[step % 2];
    update.new_weights = buffers[(step + 1) % 2];
    for (std::int64_t end = kElements; end > 0; end -= length) {
      run_update(update, std::max<std::int64_t>(0, end - length), end, 0.3F, instructions);
    }
  }
}

TEST(Update, IntoNewWeightsIsTheSameAsInPlace) {
  for (const Kind& kind : test::all_kinds()) {
    for (const Content content : {Content::kNumbers, Content::kAnyBits}) {
      const Memory wanted = expected(kind, content, 0.3F);
      for (const InstructionSet instructions : supported_instruction_sets()) {
        for (const std::int64_t length : {std::int64_t{33}, kElements}) {
          Memory memory = fresh(kind, content);
          Memory other = fresh(kind, content);
          run_steps_between(memory, other, length, instructions);
          EXPECT_EQ(other.weight_differences(wanted) + memory.state_differences(wanted), 0)
              << kind.name << ", instruction set " << static_cast<int>(instructions) << ", " << length << " a range";
        }
      }
    }
  }
}

TEST(Update, IntoNewWeightsOnlyReadsTheOldOnes) {
  for (const Kind& kind : test::all_kinds()) {
    for (const InstructionSet instructions : supported_instruction_sets()) {
      Memory memory = fresh(kind, Content::kNumbers);
      Memory other = fresh(kind, Content::kNumbers);
      ParameterUpdate update = memory.update();
      update.new_weights = other.update().weights;
      run_update(update, 0, kElements, 0.3F, instructions);
      EXPECT_EQ(memory.weight_differences(fresh(kind, Content::kNumbers)), 0) << kind.name;
      EXPECT_GT(other.weight_differences(memory), kElements / 4) << kind.name;
    }
  }
}

#if defined(__x86_64__)
TEST(Update, IsTheSameInAThreadThatFlushesDenormals) {
  constexpr unsigned kFlushing = 0x8040U;
  for (const Kind& kind : test::all_kinds()) {
    Memory memory = fresh(kind, Content::kAnyBits);
    unsigned mode_after = 0;
    std::thread([&] {
      _mm_setcsr(_mm_getcsr() | kFlushing);
      run_steps(memory, 0.3F, best_instruction_set());
      mode_after = _mm_getcsr();
    }).join();
    EXPECT_EQ(memory.differences(expected(kind, Content::kAnyBits, 0.3F)), 0) << kind.name;
    EXPECT_EQ(mode_after & kFlushing, kFlushing);
  }
}
#endif

/// The gradient as an update reads it: plain SGD from zero, with a rate of -1.
float seen_gradient(NumberFormat format, std::uint16_t bits, float scale, InstructionSet instructions) {
  std::vector<std::uint16_t> gradient(16, bits);
  std::vector<float> weights(16, 0.0F);
  ParameterUpdate update{.step = SgdStep::make({-1.0, 0.0, 0.0, 0.0, false}, true)};
  update.count = 16;
  update.gradient_format = format;
  update.weights = weights.data();
  update.gradient = gradient.data();
  run_update(update, 0, 16, scale, instructions);
  return weights[15];
}

TEST(Gradients, EveryFloat16IsReadAsTheNumberItIs) {
  for (const InstructionSet instructions : supported_instruction_sets()) {
    for (std::uint32_t bits = 0; bits < 0x7C00; ++bits) {
      const int exponent = static_cast<int>(bits >> 10);
      const double fraction = static_cast<double>(bits & 0x3FFU) / 1024.0;
      const double value = exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1.0 + fraction, exponent - 15);
      ASSERT_EQ(seen_gradient(NumberFormat::kFloat16, static_cast<std::uint16_t>(bits), 1.0F, instructions), value);
      ASSERT_EQ(seen_gradient(NumberFormat::kFloat16, static_cast<std::uint16_t>(bits | 0x8000U), 1.0F, instructions),
                -value);
    }
  }
}

TEST(Gradients, AScaledOneIsRoundedToItsOwnFormatToNearestEven) {
  for (const InstructionSet instructions : supported_instruction_sets()) {
    // 1 + 2^-7 and its neighbour, halved in the last place: ties round to even.
    EXPECT_EQ(seen_gradient(NumberFormat::kBfloat16, 0x3F81, 1.5F, instructions), 1.515625F);  // 1.51171875: a tie
    EXPECT_EQ(seen_gradient(NumberFormat::kBfloat16, 0x3F83, 1.5F, instructions), 1.53125F);   // 1.53515625: a tie
    EXPECT_EQ(seen_gradient(NumberFormat::kFloat16, 0x3C01, 1.5F, instructions), 1.501953125F);
    EXPECT_EQ(seen_gradient(NumberFormat::kFloat16, 0x0001, 0.5F, instructions), 0.0F);
    EXPECT_EQ(seen_gradient(NumberFormat::kFloat16, 0x7BFF, 2.0F, instructions), INFINITY);
  }
}

}  // namespace
}  // namespace hydra
