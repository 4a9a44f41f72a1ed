#include "csrc/base/thread_pool.h"

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

/// The pool whose body this thread is running.
thread_local const ThreadPool* inside = nullptr;

}  // namespace

struct ThreadPool::Job {
  const ThreadPool* pool;
  std::int64_t tasks;
  const std::function<void(std::int64_t)>* body;
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;

  void work() noexcept {
    const ThreadPool* outer = std::exchange(inside, pool);
    try {
      for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        (*body)(task);
      }
    } catch (...) {
      next.store(std::numeric_limits<std::int64_t>::max() / 2, std::memory_order_relaxed);
      const std::lock_guard lock(mutex);
      if (!error) {
        error = std::current_exception();
      }
    }
    inside = outer;
  }
};

class ThreadPool::Workers {
 public:
  explicit Workers(int count) : process_(getpid()) {
    try {
      for (int i = 0; i < count; ++i) {
        threads_.emplace_back([this] { serve(); });
      }
    } catch (...) {  // the threads that did start have to end before the error is thrown on
      stop();
      throw;
    }
  }

  ~Workers() { stop(); }

  bool ours() const noexcept { return process_ == getpid(); }

  void run(Job& job) {
    const std::lock_guard one_call(calls_);
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      ++generation_;
    }
    changed_.notify_all();
    job.work();
    std::unique_lock lock(mutex_);
    job_ = nullptr;  // a thread that wakes up only now has no part in it
    finished_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void serve() noexcept {
    std::uint64_t served = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || generation_ != served; });
      if (stopping_) {
        return;
      }
      served = generation_;
      Job* job = job_;
      if (job == nullptr) {
        continue;
      }
      ++busy_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--busy_ == 0) {
        finished_.notify_one();
      }
    }
  }

  void stop() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  const pid_t process_;
  std::mutex calls_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable finished_;
  Job* job_ = nullptr;
  std::uint64_t generation_ = 0;
  int busy_ = 0;  // threads that work on the job
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  HYDRA_EXPECT(threads >= 1, StateError, "a pool cannot have " + std::to_string(threads) + " threads: give 1 or more");
}

ThreadPool::~ThreadPool() {
  Workers* workers = workers_.load();
  if (workers != nullptr && workers->ours()) {
    delete workers;
  }
}

ThreadPool::Workers& ThreadPool::workers() {
  Workers* known = workers_.load();
  if (known != nullptr && known->ours()) {
    return *known;
  }
  auto fresh = std::make_unique<Workers>(threads_ - 1);
  // The parent's workers stay as they are: a child cannot join their threads, and their mutexes may be locked.
  return workers_.compare_exchange_strong(known, fresh.get()) ? *fresh.release() : *known;
}

void ThreadPool::parallel_for(std::int64_t tasks, const std::function<void(std::int64_t)>& body) {
  HYDRA_EXPECT(inside != this, StateError, "parallel_for() inside a body of the same pool would wait for itself");
  Job job{.pool = this, .tasks = tasks, .body = &body, .mutex = {}, .error = {}};
  if (threads_ == 1 || tasks <= 1) {
    job.work();
  } else {
    workers().run(job);
  }
  if (job.error) {
    std::rethrow_exception(job.error);
  }
}

}  // namespace hydra
