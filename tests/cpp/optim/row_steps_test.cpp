#include "csrc/optim/row_steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "csrc/base/errors.h"

namespace hydra {
namespace {

constexpr std::int64_t kTableRows = 700;
constexpr std::int64_t kRowWidth = 13;

/// A table with its moments, and how many steps each row has made.
struct Table {
  std::vector<float> weights = std::vector<float>(kTableRows * kRowWidth);
  std::vector<float> first = std::vector<float>(kTableRows * kRowWidth);
  std::vector<float> second = std::vector<float>(kTableRows * kRowWidth);
  std::vector<std::int32_t> made = std::vector<std::int32_t>(kTableRows);

  Table() {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      weights[i] = static_cast<float>(i % 97) / 7.0F - 6.0F;
    }
    weights[5] = -0.0F;
  }

  ParameterUpdate whole() {
    ParameterUpdate update{};
    update.step = AdamStep{};
    update.count = kTableRows * kRowWidth;
    update.weights = weights.data();
    update.first_moment = first.data();
    update.second_moment = second.data();
    return update;
  }

  Rows rows(const std::vector<std::int64_t>& numbers) { return {whole(), kRowWidth, numbers, made}; }

  /// A step of the whole table, whose gradient is that of these rows.
  void step_whole(const AdamStep& step, const std::vector<std::int64_t>& numbers, const std::vector<float>& values) {
    std::vector<float> gradient(weights.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      std::copy_n(values.begin() + static_cast<std::int64_t>(i) * kRowWidth, kRowWidth,
                  gradient.begin() + numbers[i] * kRowWidth);
    }
    ParameterUpdate update = whole();
    update.step = step;
    update.gradient = gradient.data();
    run_update(update, 0, update.count, 1.0F);
  }
};

void expect_same_bits(const std::vector<float>& ours, const std::vector<float>& wanted) {
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(ours[i]), std::bit_cast<std::uint32_t>(wanted[i])) << "element " << i;
  }
}

std::vector<std::int64_t> every_row() {
  std::vector<std::int64_t> numbers(kTableRows);
  for (std::int64_t row = 0; row < kTableRows; ++row) {
    numbers[static_cast<std::size_t>(row)] = row;
  }
  return numbers;
}

class RowSteps : public testing::TestWithParam<double> {};  // the weight decay

TEST_P(RowSteps, MissedStepsThatAreMadeLaterHaveTheBitsOfStepsOfTheWhole) {
  for (const int threads : {1, 3}) {
    Table wanted;
    Table ours;
    ThreadPool pool(threads);
    std::vector<MissedStep> missed;
    constexpr std::int64_t kFirst = 4;  // steps that all rows have made before
    std::fill(ours.made.begin(), ours.made.end(), static_cast<std::int32_t>(kFirst));
    for (std::int64_t number = 1; number <= 6; ++number) {
      const AdamStep step =
          AdamStep::make({1e-2 * static_cast<double>(number), 0.9, 0.99, 1e-8, GetParam(), true}, number);
      const std::vector<std::int64_t> numbers{number % 3, 100 + number, 650};
      std::vector<float> values(numbers.size() * kRowWidth);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(i) * 0.25F - static_cast<float>(number);
      }
      wanted.step_whole(step, numbers, values);
      catch_up(ours.rows(numbers), kFirst, missed, pool);
      missed.push_back({step, GetParam() == 0.0});
      step_rows(ours.rows(numbers), step, values.data(), static_cast<std::int32_t>(kFirst + number), pool);
      EXPECT_EQ(ours.made[650], kFirst + number);
      EXPECT_EQ(ours.made[99], kFirst);
    }
    catch_up(ours.rows(every_row()), kFirst, missed, pool);
    expect_same_bits(ours.weights, wanted.weights);
    expect_same_bits(ours.first, wanted.first);
    expect_same_bits(ours.second, wanted.second);
    EXPECT_EQ(ours.made, std::vector<std::int32_t>(kTableRows, kFirst + 6));
  }
}

INSTANTIATE_TEST_SUITE_P(Decays, RowSteps, testing::Values(0.0, 0.1));

TEST(RowStepsOfATable, RowsThatAParameterLacksAreRefused) {
  Table table;
  ThreadPool pool(1);
  const std::vector<float> values(kRowWidth);
  for (const std::int64_t row : {std::int64_t{-1}, kTableRows}) {
    const std::vector<std::int64_t> numbers{row};
    EXPECT_THROW(step_rows(table.rows(numbers), AdamStep{}, values.data(), 1, pool), StateError);
    EXPECT_THROW(catch_up(table.rows(numbers), 0, {}, pool), StateError);
  }
  const std::vector<std::int64_t> numbers{0};
  Rows rows = table.rows(numbers);
  rows.whole.moment_format = NumberFormat::kBfloat16;
  EXPECT_THROW(catch_up(rows, 0, {}, pool), StateError);
}

}  // namespace
}  // namespace hydra
