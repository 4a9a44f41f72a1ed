// Protection against use in a forked child, which has a copy of the engine's memory but none of its threads.
//
// HomeProcess tells whether this process made an object. HomeOnly never destroys its value in a child. A visit of a
// block asks several times, and a system call each time would show. So forks are counted, by a handler of fork().
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>

#include "csrc/base/errors.h"

namespace hydra {

/// The number of forks that lead from the first process to this one.
std::int64_t forks() noexcept;

/// The process that made an object.
class HomeProcess {
 public:
  bool here() const noexcept { return forks() == forks_; }
  /// Throws StateError in a forked child.
  void expect_here() const {
    HYDRA_EXPECT(here(), StateError,
                 "this offloaded model belongs to process " + std::to_string(id_) +
                     " and cannot be used in a forked child, which has none of its threads; offload a model in the "
                     "child, or start the child by spawn");
  }

 private:
  std::int64_t forks_ = forks();
  pid_t id_ = ::getpid();  // for messages
};

/// Owns a thread, or a primitive that threads wait on. In a forked child the destructor leaks the value: destroying it
/// would wait for threads that the child does not have.
template <class T>
class HomeOnly {
 public:
  HomeOnly() = default;
  HomeOnly(const HomeOnly&) = delete;
  HomeOnly& operator=(const HomeOnly&) = delete;
  ~HomeOnly() {
    if (!home_.here()) {
      static_cast<void>(value_.release());
    }
  }

  T* operator->() noexcept { return value_.get(); }
  T& operator*() noexcept { return *value_; }

 private:
  HomeProcess home_;
  std::unique_ptr<T> value_ = std::make_unique<T>();
};

}  // namespace hydra
