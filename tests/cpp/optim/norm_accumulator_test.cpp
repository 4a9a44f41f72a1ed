#include "csrc/optim/norm_accumulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "tests/cpp/support.h"

namespace hydra {
namespace {

using Numbers = std::vector<float>;

NormAccumulator::Summation summing(int threads) {
  return [pool = std::make_shared<ThreadPool>(threads)](std::span<const NormInput> gradients, std::span<double> sums) {
    sums_of_squares(gradients, sums, *pool);
  };
}

std::vector<Numbers> gradients(std::size_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<Numbers> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    made[i].resize(1 + (i * 7919) % (3 * kNormChunk));
    std::generate(made[i].begin(), made[i].end(), [&] { return normal(random); });
  }
  return made;
}

NormInput input(const Numbers& numbers) {
  return {numbers.data(), NumberFormat::kFloat32, static_cast<std::int64_t>(numbers.size())};
}

double sum_of(const Numbers& numbers) {
  ThreadPool alone(1);
  const NormInput one = input(numbers);
  double sum = -1.0;
  sums_of_squares({&one, 1}, {&sum, 1}, alone);
  return sum;
}

void arrive(NormAccumulator& accumulator, const Numbers& numbers) {
  accumulator.arrived(&numbers, accumulator.expect(&numbers), input(numbers), nullptr);
}

TEST(NormAccumulator, SumsAreThoseOfTheNormWhateverThreadsAndOrder) {
  const std::vector<Numbers> all = gradients(24);
  for (const int threads : {1, 2, 4}) {
    std::vector<std::size_t> order(all.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<std::uint32_t>(threads)));
    NormAccumulator accumulator(summing(threads));
    for (const std::size_t i : order) {
      arrive(accumulator, all[i]);
      accumulator.release();
    }
    const auto sums = accumulator.take();
    ASSERT_EQ(sums.size(), all.size());
    for (const Numbers& numbers : all) {
      EXPECT_EQ(sums.at(&numbers).value, sum_of(numbers)) << numbers.size() << " numbers, " << threads << " threads";
    }
  }
}

TEST(NormAccumulator, ManyThreadsMayHandGradientsOver) {
  const std::vector<Numbers> all = gradients(32);
  NormAccumulator accumulator(summing(2));
  std::vector<std::thread> threads;
  for (std::size_t first = 0; first < 4; ++first) {
    threads.emplace_back([&, first] {
      for (std::size_t i = first; i < all.size(); i += 4) {
        arrive(accumulator, all[i]);
        accumulator.release();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const auto sums = accumulator.take();
  ASSERT_EQ(sums.size(), all.size());
  for (const Numbers& numbers : all) {
    EXPECT_EQ(sums.at(&numbers).value, sum_of(numbers));
  }
}

TEST(NormAccumulator, TheMemoryMayBeWrittenBetweenExpectationAndArrival) {
  std::vector<Numbers> all = gradients(3);
  NormAccumulator accumulator(summing(2));
  for (int part = 0; part < 50; ++part) {
    for (Numbers& numbers : all) {
      const std::int64_t expected = accumulator.expect(&numbers);
      for (float& number : numbers) {
        number += 1.0F;  // a race, were it still being read
      }
      accumulator.arrived(&numbers, expected, input(numbers), nullptr);
      accumulator.release();
    }
  }
  const auto sums = accumulator.take();
  for (const Numbers& numbers : all) {
    EXPECT_EQ(sums.at(&numbers).value, sum_of(numbers));
  }
}

TEST(NormAccumulator, WhatIsFinishedIsNotReadAnyMoreAndItsSumStands) {
  std::vector<Numbers> all = gradients(8);
  std::vector<double> sums;
  NormAccumulator accumulator(summing(2));
  for (const Numbers& numbers : all) {
    sums.push_back(sum_of(numbers));
    arrive(accumulator, numbers);
    accumulator.release();
  }
  accumulator.finish();
  for (Numbers& numbers : all) {
    std::fill(numbers.begin(), numbers.end(), 0.0F);  // a race, were one still being read
  }
  const auto found = accumulator.take();
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(found.at(&all[i]).value, sums[i]);
  }
}

TEST(NormAccumulator, ASumBelongsToTheLastOfSeveralParts) {
  const std::vector<Numbers> all = gradients(2);
  const void* const key = &all;
  NormAccumulator accumulator(summing(1));
  const std::int64_t first = accumulator.expect(key);
  const std::int64_t second = accumulator.expect(key);
  accumulator.arrived(key, second, input(all[1]), nullptr);
  accumulator.arrived(key, first, input(all[0]), nullptr);
  EXPECT_EQ(accumulator.take().at(key).value, sum_of(all[1]));

  arrive(accumulator, all[0]);
  accumulator.release();
  accumulator.expect(&all[0]);  // one more part, which never arrives
  EXPECT_TRUE(accumulator.take().empty());
}

TEST(NormAccumulator, WhatIsForgottenHasNoSum) {
  const std::vector<Numbers> all = gradients(3);
  NormAccumulator accumulator(summing(1));
  arrive(accumulator, all[0]);
  const std::int64_t expected = accumulator.expect(&all[1]);
  accumulator.release();
  accumulator.forget();
  accumulator.arrived(&all[1], expected, input(all[1]), nullptr);
  arrive(accumulator, all[2]);
  const auto sums = accumulator.take();
  ASSERT_EQ(sums.size(), 1U);
  EXPECT_EQ(sums.at(&all[2]).value, sum_of(all[2]));
  EXPECT_TRUE(accumulator.take().empty());
}

TEST(NormAccumulator, HandingOverNeverWaitsForTheSums) {
  const std::vector<Numbers> all = gradients(8);
  test::Gate gate;
  NormAccumulator accumulator([&gate, sum = summing(1)](auto gradients, auto sums) {
    gate.wait();
    sum(gradients, sums);
  });
  for (const Numbers& numbers : all) {
    arrive(accumulator, numbers);
    accumulator.release();
  }
  gate.open();
  EXPECT_EQ(accumulator.take().size(), all.size());
}

TEST(NormAccumulator, AnOwnerIsKeptUntilItsSumIsTakenAndComesBackWithIt) {
  const auto numbers = std::make_shared<Numbers>(5 * kNormChunk, 1.0F);
  const std::weak_ptr<Numbers> watched = numbers;
  NormAccumulator accumulator(summing(2));
  accumulator.arrived(numbers.get(), accumulator.expect(numbers.get()), input(*numbers), numbers);
  EXPECT_EQ(watched.use_count(), 2);
  EXPECT_EQ(accumulator.take().at(numbers.get()).owner, numbers);
  EXPECT_EQ(watched.use_count(), 1);
  arrive(accumulator, *numbers);
}

TEST(NormAccumulator, ASumBeginsOnceItsGradientHasArrivedAndWasReleased) {
  const std::vector<Numbers> all = gradients(2);
  std::atomic<std::size_t> begun{0};
  test::Gate reached;
  NormAccumulator accumulator([&, sum = summing(1)](auto gradients, auto sums) {
    begun += gradients.size();
    reached.open();
    sum(gradients, sums);
  });
  arrive(accumulator, all[0]);
  const std::int64_t expected = accumulator.expect(&all[1]);
  EXPECT_EQ(begun, 0U);
  accumulator.release();
  reached.wait();  // it was not asked for
  EXPECT_EQ(begun, 1U);
  accumulator.arrived(&all[1], expected, input(all[1]), nullptr);
  EXPECT_EQ(accumulator.take().size(), 2U);
  EXPECT_EQ(begun, 2U);
}

TEST(NormAccumulator, EndsWhileItIsAtWork) {
  std::vector<Numbers> all = gradients(3);
  test::Gate reached;
  auto accumulator = std::make_unique<NormAccumulator>([&, sum = summing(2)](auto gradients, auto sums) {
    reached.open();
    sum(gradients, sums);
  });
  arrive(*accumulator, all[2]);
  accumulator->release();
  reached.wait();
  arrive(*accumulator, all[0]);
  accumulator->release();
  arrive(*accumulator, all[1]);
  accumulator.reset();
  for (Numbers& numbers : all) {
    numbers.front() += 1.0F;  // a race, were it still being read
  }
}

TEST(NormAccumulator, WhatCannotBeSummedIsNotKnownAndTheNextOnesAre) {
  const std::vector<Numbers> all = gradients(2);
  bool fails = true;
  NormAccumulator accumulator([&, sum = summing(1)](auto gradients, auto sums) {
    if (std::exchange(fails, false)) {
      throw StateError("no threads left");
    }
    sum(gradients, sums);
  });
  arrive(accumulator, all[0]);
  EXPECT_TRUE(accumulator.take().empty());
  arrive(accumulator, all[1]);
  EXPECT_EQ(accumulator.take().at(&all[1]).value, sum_of(all[1]));
}

}  // namespace
}  // namespace hydra
