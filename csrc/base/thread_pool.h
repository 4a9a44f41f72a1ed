// A fixed number of threads that share the tasks of one call. There is no process-wide pool: code with parallel work
// owns its pool.
//
// Threads start with the first call that has work for them, and end with the pool. Thread-safe.
// A forked child has none of its parent's threads. Its first call starts new ones and leaves the parent's state alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace hydra {

class ThreadPool {
 public:
  /// `threads` is at least 1 and counts the caller of parallel_for(): a pool of one has no threads of its own.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept { return threads_; }

  /// Calls body(0) ... body(tasks - 1) once each, on the caller and the pool's threads, and returns after the last.
  /// Results must not depend on which thread takes which task. After a task has thrown, no new task begins, and the
  /// first exception is thrown here. Calls from several threads run one after the other. A call from inside a body of
  /// the same pool throws StateError. A thread that wakes up when no task is left is not waited for.
  void parallel_for(std::int64_t tasks, const std::function<void(std::int64_t)>& body);

 private:
  struct Job;
  class Workers;

  Workers& workers();

  int threads_;
  std::atomic<Workers*> workers_{nullptr};  // this process's, or still the parent's after a fork
};

}  // namespace hydra
