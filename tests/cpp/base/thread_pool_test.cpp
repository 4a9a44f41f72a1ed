#include "csrc/base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/errors.h"

namespace hydra {
namespace {

std::vector<int> counts_of(ThreadPool& pool, std::int64_t tasks) {
  std::vector<std::atomic<int>> calls(static_cast<std::size_t>(tasks));
  pool.parallel_for(tasks, [&](std::int64_t task) { ++calls[static_cast<std::size_t>(task)]; });
  return {calls.begin(), calls.end()};
}

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (const std::int64_t tasks : {0, 1, 2, 1000, 3}) {
      EXPECT_EQ(counts_of(pool, tasks), std::vector<int>(static_cast<std::size_t>(tasks), 1));
    }
  }
}

TEST(ThreadPool, ItsThreadsAndTheCallerWorkAtTheSameTime) {
  ThreadPool pool(3);
  std::latch all_there(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  pool.parallel_for(3, [&](std::int64_t) {
    all_there.arrive_and_wait();  // passed only if three threads hold a task each
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(seen.size(), 3U);
  EXPECT_TRUE(seen.contains(std::this_thread::get_id()));
}

TEST(ThreadPool, OfOneRunsInOrderOnTheCaller) {
  ThreadPool pool(1);
  std::vector<std::int64_t> order;
  pool.parallel_for(4, [&](std::int64_t task) { order.push_back(task); });
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3}));
}

TEST(ThreadPool, ThrowsWhatATaskThrewAndGoesOnWorking) {
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    std::atomic<int> begun = 0;
    const auto body = [&](std::int64_t) {
      ++begun;
      throw std::runtime_error("task");
    };
    EXPECT_THROW(pool.parallel_for(1000, body), std::runtime_error);
    EXPECT_LE(begun, threads);
    EXPECT_EQ(counts_of(pool, 100), std::vector<int>(100, 1));
  }
}

TEST(ThreadPool, RefusesToWaitForItself) {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    EXPECT_THROW(pool.parallel_for(2, [&](std::int64_t) { pool.parallel_for(2, [](std::int64_t) {}); }), StateError);
    EXPECT_EQ(counts_of(pool, 10), std::vector<int>(10, 1));
  }
}

TEST(ThreadPool, ServesAnotherPoolsTasks) {
  ThreadPool outer(2);
  ThreadPool inner(2);
  std::atomic<int> calls = 0;
  outer.parallel_for(8, [&](std::int64_t) { inner.parallel_for(8, [&](std::int64_t) { ++calls; }); });
  EXPECT_EQ(calls, 64);
}

TEST(ThreadPool, ServesSeveralCallersOneAfterTheOther) {
  ThreadPool pool(2);
  std::vector<std::vector<int>> seen(4);
  std::vector<std::thread> callers;
  for (std::vector<int>& counts : seen) {
    callers.emplace_back([&] { counts = counts_of(pool, 500); });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  for (const std::vector<int>& counts : seen) {
    EXPECT_EQ(counts, std::vector<int>(500, 1));
  }
}

TEST(ThreadPool, IsNotMadeOfLessThanOneThread) { EXPECT_THROW(ThreadPool(0), StateError); }

}  // namespace
}  // namespace hydra
