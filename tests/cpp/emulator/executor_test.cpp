// The executor runs kernels that keep CUDA's rules, and tells of those that break them.
//
// Under AddressSanitizer and ThreadSanitizer it is seen what only these see.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cfenv>
#include <cstdlib>
#include <latch>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "emulator/cudart/control.h"
#include "emulator/kernels/executor.h"
#include "tests/cpp/emulator/runtime_support.h"
#include "translated/small_kernels.cpp"

namespace emulated_cuda::kernels {
namespace {

using namespace small_kernels;

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadsOfSystem = true;
#else
constexpr bool kThreadsOfSystem = false;
#endif

/// Why a grid fails; empty if it does not.
template <class Body>
std::string failure(const char* kernel, unsigned blocks, unsigned threads, Body body, std::uint64_t seed = 1) {
  try {
    run_grid({kernel, blocks, threads, seed}, body);
  } catch (const KernelError& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<int> counted(unsigned count) {
  std::vector<int> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 100);
  return numbers;
}

// ---- launches -------------------------------------------------------------------------------------------------------

class Launch : public test::Emulated {};

TEST_F(Launch, RunsEveryThreadOfEveryBlock) {
  const test::OwnStream stream;
  const std::vector<int> from = counted(5 * kThreads);
  std::vector<int> to(from.size());
  ASSERT_EQ(launch_reverse(from.data(), to.data(), 5, kThreads, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  for (unsigned at = 0; at < to.size(); ++at) {
    EXPECT_EQ(to[at], from[at / kThreads * kThreads + kThreads - 1 - at % kThreads]);
  }
}

TEST_F(Launch, CopiesArgumentsAndRunsInTheStreamsTurn) {
  const test::OwnStream stream;
  Triple triple{{1, 20, 300}};
  int sum = -1;
  {
    const test::Held held(stream);
    ASSERT_EQ(launch_store_sum(triple, &sum, stream), cudaSuccess);
    triple = {};
    EXPECT_EQ(sum, -1);
  }
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(sum, 321);
}

TEST_F(Launch, TakesTemplates) {
  const test::OwnStream stream;
  std::vector<long long> numbers = {1, 2, 3};
  ASSERT_EQ(launch_multiply(numbers.data(), 3, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(numbers, (std::vector<long long>{7, 14, 21}));
}

TEST_F(Launch, RefusesGridsAndBlocksThatNoGpuRuns) {
  const test::OwnStream stream;
  constexpr unsigned kMost = 1024;
  for (const auto& [blocks, threads] : std::vector<std::pair<dim3, dim3>>{{0, 1},
                                                                          {1, 0},
                                                                          {dim3(1, 0), 1},
                                                                          {dim3(1, 65536), 1},
                                                                          {dim3(1, 1, 65536), 1},
                                                                          {dim3(0x80000000U), 1},
                                                                          {1, kMost + 1},
                                                                          {1, dim3(33, 32)},
                                                                          {1, dim3(1, 1, 65)}}) {
    EXPECT_EQ(launch_reverse(nullptr, nullptr, blocks, threads, stream), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);  // nothing ran
}

TEST_F(Launch, LeavesAnErrorOfTheRuntimeBehind) {
  const test::OwnStream stream;
  fail("cudaLaunchKernel", cudaErrorMemoryAllocation);
  EXPECT_EQ(launch_reverse(nullptr, nullptr, 1, 1, stream), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

TEST_F(Launch, FailsTheDeviceIfTheKernelBreaksTheRules) {
  const test::OwnStream stream;
  std::latch gate(1);  // so that the launch does not return the kernel's own error
  launch(stream, [&gate] { gate.wait(); });
  ASSERT_EQ(launch_barrier_in_branch(3, stream), cudaSuccess);
  gate.count_down();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
  EXPECT_TRUE(contains(last_error(), "kernel barrier_in_branch, block (")) << last_error();
  EXPECT_TRUE(contains(last_error(), "small_kernels.cu:" + std::to_string(kBranchLine))) << last_error();
}

// ---- grids and blocks -----------------------------------------------------------------------------------------------

TEST(Grid, HasCudasCoordinates) {
  const dim3 blocks(2, 3, 2);
  const dim3 threads(5, 2, 3);
  std::vector<std::uint64_t> found(12 * 30);
  run_grid({"note_coordinates", blocks, threads, 1}, [&] { note_coordinates(found.data()); });
  for (unsigned at = 0; at < found.size(); ++at) {
    const unsigned block = at / 30;
    const unsigned thread = at % 30;
    std::uint64_t wanted = 0;
    for (const unsigned digit : {block % 2, block / 2 % 3, block / 6, thread % 5, thread / 5 % 2, thread / 10}) {
      wanted = 10 * wanted + digit;
    }
    EXPECT_EQ(found[at], wanted);
  }
}

std::vector<unsigned> order(unsigned blocks, unsigned threads, std::uint64_t seed) {
  unsigned count = 0;
  std::vector<unsigned> found(std::size_t{blocks} * threads);
  run_grid({"note_order", blocks, threads, seed}, [&] { note_order(&count, found.data()); });
  return found;
}

TEST(Grid, RunsEachBlockOnceInAnOrderOfTheSeed) {
  if (kThreadsOfSystem) {
    return;  // blocks that run together take turns as the system likes
  }
  std::set<std::vector<unsigned>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<unsigned> found = order(50, 1, seed);
    EXPECT_EQ(found, order(50, 1, seed));
    orders.insert(found);
    std::ranges::sort(found);
    for (unsigned at = 0; at < found.size(); ++at) {
      EXPECT_EQ(found[at], at);
    }
  }
  EXPECT_EQ(orders.size(), 20);
}

TEST(Grid, RunsThreadsInAnOrderOfTheSeed) {
  if (kThreadsOfSystem) {
    return;
  }
  std::set<std::vector<unsigned>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(order(1, 40, seed), order(1, 40, seed));
    orders.insert(order(1, 40, seed));
  }
  EXPECT_EQ(orders.size(), 20);
}

TEST(Grid, LaunchesDifferAndRepeatFromASeed) {
  if (kThreadsOfSystem) {
    return;
  }
  const test::OwnStream stream;
  std::array<std::vector<unsigned>, 4> found;
  for (std::size_t round = 0; round < found.size(); ++round) {
    if (round % 2 == 0) {
      set_seed(7);
    }
    unsigned count = 0;
    found[round].resize(40);
    launch_kernel("note_order", {1, 40, 0, stream}, note_order, &count, found[round].data());
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  EXPECT_NE(found[0], found[1]);
  EXPECT_EQ(found[0], found[2]);
  EXPECT_EQ(found[1], found[3]);
}

TEST(Grid, HasTheDevicesRounding) {
  const std::array<float, 2> numbers = {1.0F, 3.0F};
  float up = 0.0F;
  const int before = std::fegetround();
  std::fesetround(FE_UPWARD);
  run_grid({"divide", 1, 1, 1}, [&] { divide(numbers.data(), &up); });
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(before);
  volatile float one = 1.0F;
  EXPECT_EQ(up, one / 3.0F);
}

TEST(SharedMemory, IsPoisonedBeforeEachBlock) {
  std::vector<std::uint32_t> words(5 * 40);
  run_grid({"copy_poison", 40, 3, 1}, [&] { copy_poison(words.data()); });
  EXPECT_EQ(std::set<std::uint32_t>(words.begin(), words.end()).size(), words.size());
  std::vector<std::uint32_t> again(words.size());
  run_grid({"copy_poison", 40, 3, 1}, [&] { copy_poison(again.data()); });
  EXPECT_EQ(words, again);
  run_grid({"copy_poison", 40, 3, 2}, [&] { copy_poison(again.data()); });
  EXPECT_NE(words, again);
}

// ---- a warp ---------------------------------------------------------------------------------------------------------

void expect_combined(const std::array<int, 32>& numbers, unsigned mask, unsigned delta, const WarpResults& found) {
  std::uint32_t votes = 0;
  std::uint32_t sum = 0;
  std::vector<int> signed_numbers;
  std::vector<std::uint32_t> patterns;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1U) != 0) {
      signed_numbers.push_back(numbers[lane]);
      patterns.push_back(static_cast<std::uint32_t>(numbers[lane]));
      sum += patterns.back();
      votes |= numbers[lane] > 0 ? 1U << lane : 0U;
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1U) == 0) {
      continue;
    }
    EXPECT_EQ(found.votes[lane], votes);
    EXPECT_EQ(found.least[lane], *std::ranges::min_element(signed_numbers));
    EXPECT_EQ(found.greatest[lane], *std::ranges::max_element(signed_numbers));
    EXPECT_EQ(found.least_unsigned[lane], *std::ranges::min_element(patterns));
    EXPECT_EQ(found.greatest_unsigned[lane], *std::ranges::max_element(patterns));
    EXPECT_EQ(static_cast<std::uint32_t>(found.sum[lane]), sum);
    EXPECT_EQ(found.sum_unsigned[lane], sum);
    const auto from = [&](unsigned distance) { return lane + distance < 32 ? lane + distance : lane; };
    if ((mask >> from(delta) & 1U) != 0) {
      EXPECT_EQ(found.shifted[lane], static_cast<float>(numbers[from(delta)]));
    } else {
      EXPECT_NE(found.shifted[lane], static_cast<float>(numbers[lane]));
    }
    if ((mask >> from(lane % 4) & 1U) != 0) {
      EXPECT_EQ(found.shifted_twice[lane], 0.1 * numbers[from(lane % 4)]);
    }
  }
}

TEST(Warp, CombinesAsLoopsDo) {
  std::mt19937 random(3);
  for (unsigned round = 0; round < (kThreadsOfSystem ? 20 : 400); ++round) {
    std::array<int, 32> numbers{};
    for (int& number : numbers) {
      number = static_cast<int>(random());
    }
    const unsigned mask = round % 4 == 0 ? ~0U : static_cast<unsigned>(random()) | 1U << random() % 32;
    const unsigned delta = static_cast<unsigned>(random() % 40);
    WarpResults found{};
    run_grid({"combine", 1, 32, round}, [&] { combine(numbers.data(), mask, delta, &found); });
    expect_combined(numbers, mask, delta, found);
  }
}

TEST(Warp, UpdatesAtomically) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    std::vector<std::uint32_t> words(36);
    words[35] = 32;
    run_grid({"update_atomically", 1, 32, seed}, [&] { update_atomically(words.data()); });
    EXPECT_EQ(words[0], ~0U);
    EXPECT_EQ(words[1], ~0U);
    words[2 + words[35]] += 1;
    EXPECT_EQ(std::count(words.begin() + 2, words.end() - 1, 1U), 33);
  }
}

// ---- kernels that break the rules -----------------------------------------------------------------------------------

TEST(BrokenKernel, ShowsAMissingBarrierInItsNumbers) {
  if (kThreadsOfSystem) {
    return;  // ThreadSanitizer sees it below
  }
  const std::vector<int> from = counted(kThreads);
  int without_barrier = 0;
  int after_warp_barrier = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<int> to(kThreads);
    run_grid({"", 1, kThreads, seed}, [&] { reverse_without_barrier(from.data(), to.data()); });
    without_barrier += !std::equal(to.rbegin(), to.rend(), from.begin());
    run_grid({"", 1, kThreads, seed}, [&] { reverse_after_warp_barrier(from.data(), to.data()); });
    after_warp_barrier += !std::equal(to.rbegin(), to.rend(), from.begin());
  }
  EXPECT_EQ(without_barrier, 20);
  EXPECT_GT(after_warp_barrier, 10);
}

TEST(BrokenKernel, LeavesABarrierOut) {
  for (const unsigned threads : {1U, 32U, kThreads - 1}) {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      const std::string text = failure("some_name", 3, kThreads, [&] { barrier_in_branch(threads); }, seed);
      EXPECT_TRUE(contains(text, "kernel some_name, block (")) << text;
      EXPECT_TRUE(contains(text, "not all threads of the block reach a barrier")) << text;
      EXPECT_TRUE(contains(text, "small_kernels.cu:" + std::to_string(kBranchLine))) << text;
    }
  }
  EXPECT_EQ(failure("", 3, kThreads, [] { barrier_in_branch(kThreads); }), "");
  EXPECT_EQ(failure("", 3, kThreads, [] { barrier_in_branch(0); }), "");
}

TEST(BrokenKernel, WaitsAtTwoBarriers) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const std::string text = failure("", 1, kThreads, [] { one_of_two_barriers(7); }, seed);
    EXPECT_TRUE(contains(text, "different barriers")) << text;
  }
  EXPECT_EQ(failure("", 1, kThreads, [] { one_of_two_barriers(kThreads); }), "");
}

TEST(BrokenKernel, VotesWithoutAllLanes) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const std::string text = failure("", 2, kThreads, [] { vote_in_branch(31); }, seed);
    EXPECT_TRUE(contains(text, "ended") && contains(text, "__ballot_sync(0xffffffff)")) << text;
  }
  EXPECT_EQ(failure("", 2, kThreads, [] { vote_in_branch(32); }), "");
}

TEST(BrokenKernel, DoesDifferentThingsInOneWarp) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const std::string text = failure("", 1, kThreads, [] { vote_or_barrier(9); }, seed);
    EXPECT_TRUE(contains(text, "__ballot_sync(") && contains(text, "__syncwarp(")) << text;
    EXPECT_TRUE(contains(text, "do not do the same")) << text;
  }
}

TEST(BrokenKernel, HasAWrongMask) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    EXPECT_NE(failure("", 1, 32, [] { vote_with_masks(16); }, seed), "");
    EXPECT_TRUE(contains(failure("", 1, 32, [] { vote_without_itself(0x7FFFFFFFU); }, seed), "not in its own mask"));
    EXPECT_TRUE(contains(failure("", 1, 20, [] { vote_without_itself(0xFFFFFFFFU); }, seed), "0xfff00000"));
  }
  EXPECT_EQ(failure("", 1, 20, [] { vote_without_itself(0xFFFFFU); }), "");
}

TEST(BrokenKernel, ThatIsStuckIsToldFrom) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const std::string text = failure("", 1, kThreads, [] { wait_for_each_other(); }, seed);
    EXPECT_TRUE(contains(text, "no thread can go on")) << text;
    EXPECT_TRUE(contains(text, "32 of 64 threads wait in __syncthreads()")) << text;
    EXPECT_TRUE(contains(text, "of warp 0 lanes 0xffff wait")) << text;
  }
}

TEST(BrokenKernel, ThatThrowsIsAbandoned) {
  EXPECT_TRUE(contains(failure("", 1, kThreads, [] { throw_number(3); }), "a thread threw"));
  EXPECT_EQ(failure("", 1, kThreads, [] { barrier_in_branch(kThreads); }), "");  // the next one runs
}

#if defined(__SANITIZE_ADDRESS__)
TEST(BrokenKernelDeathTest, WritesBesideASharedVariable) {
  for (const int at : {-1, 8}) {
    EXPECT_DEATH(run_grid({"", 1, 8, 1}, [&] { write_beside(&at); }), "heap-buffer-overflow");
  }
}
#endif

#if defined(__SANITIZE_THREAD__)
/// Whether ThreadSanitizer sees a race in the grid.
template <class Body>
void expect_race(unsigned blocks, unsigned threads, Body body) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        run_grid({"", blocks, threads, 1}, body);
        std::exit(0);
      },
      testing::ExitedWithCode(66), "data race");
}

TEST(BrokenKernelDeathTest, RacesForSharedMemory) {
  const std::vector<int> from = counted(kThreads);
  std::vector<int> to(kThreads);
  expect_race(1, kThreads, [&] { reverse_without_barrier(from.data(), to.data()); });
  expect_race(1, kThreads, [&] { reverse_after_warp_barrier(from.data(), to.data()); });
  expect_race(1, 32, [&] { reverse_after_vote(from.data(), to.data()); });
}

TEST(BrokenKernelDeathTest, RacesForGlobalMemory) {
  int count = 0;
  expect_race(1, 2, [&] { count_without_atomic(&count); });
  expect_race(2, 1, [&] { count_without_atomic(&count); });
}
#endif

}  // namespace
}  // namespace emulated_cuda::kernels
