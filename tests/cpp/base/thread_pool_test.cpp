#include "csrc/base/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <future>
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

/// Holds a thread in a signal's handler, as a busy machine keeps it from waking up. One at a time.
class HeldThread {
 public:
  explicit HeldThread(pthread_t thread) {
    EXPECT_EQ(::pipe(entered_), 0);
    EXPECT_EQ(::pipe(released_), 0);
    std::signal(SIGUSR1, [](int) {
      char byte = 1;
      static_cast<void>(::write(entered_[1], &byte, 1) == 1 && ::read(released_[0], &byte, 1) == 1);
    });
    ::pthread_kill(thread, SIGUSR1);
    char byte = 0;
    EXPECT_EQ(::read(entered_[0], &byte, 1), 1);
  }
  ~HeldThread() {
    const char byte = 1;
    EXPECT_EQ(::write(released_[1], &byte, 1), 1);  // the handler, and both pipes, stay
  }
  HeldThread(const HeldThread&) = delete;
  HeldThread& operator=(const HeldThread&) = delete;

 private:
  static inline int entered_[2];
  static inline int released_[2];
};

TEST(ThreadPool, DoesNotWaitForAThreadThatWakesUpLate) {
  ThreadPool pool(2);
  const pthread_t caller = ::pthread_self();
  std::atomic<pthread_t> worker = caller;
  std::latch both(2);
  pool.parallel_for(2, [&](std::int64_t) {
    both.arrive_and_wait();  // each thread has one task
    if (::pthread_self() != caller) {
      worker = ::pthread_self();
    }
  });
  std::future<std::vector<int>> call;
  {
    const HeldThread held(worker);
    call = std::async(std::launch::async, [&pool] { return counts_of(pool, 100); });
    EXPECT_EQ(call.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  }
  EXPECT_EQ(call.get(), std::vector<int>(100, 1));
  EXPECT_EQ(counts_of(pool, 100), std::vector<int>(100, 1));
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
