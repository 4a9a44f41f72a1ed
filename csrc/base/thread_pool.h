// A fixed number of threads that share the tasks of one call. There is no pool for the whole process: code with
// parallel work owns one.
//
// Threads start with the first call that has work for them, and end with the pool. A forked child has none of its
// parent's threads: the first call there starts its own, and what the parent's left behind is never touched.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace hydra {

class ThreadPool {
 public:
  /// `threads` counts the caller of parallel_for(), so a pool of one has no threads of its own. At least 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept { return threads_; }

  /// Calls body(0) ... body(tasks - 1), each once, by the caller and the pool's threads together, and returns when
  /// all have. Which thread takes which task is not defined: results must not depend on it. After a task has thrown
  /// no new ones begin, and the first exception is thrown here. Calls from several threads are served one after the
  /// other; a call from inside a body of the same pool is a StateError.
  void parallel_for(std::int64_t tasks, const std::function<void(std::int64_t)>& body);

 private:
  struct Job;
  class Workers;

  Workers& workers();

  int threads_;
  std::atomic<Workers*> workers_{nullptr};  // this process's, or left behind by the parent's
};

}  // namespace hydra
