// What a forked child must leave alone: it has a copy of the engine's memory, but none of its threads.
#pragma once

#include <unistd.h>

#include <memory>

#include "csrc/base/errors.h"

namespace hydra {

/// The process that an object was made in.
class HomeProcess {
 public:
  bool here() const noexcept { return ::getpid() == id_; }
  /// Throws StateError in a forked child.
  void expect_here() const {
    HYDRA_EXPECT(here(), StateError,
                 "this offloaded model belongs to process " + std::to_string(id_) +
                     " and cannot be used in a forked child, which has none of its threads; offload a model of the "
                     "child's own, or start the process by spawn");
  }

 private:
  pid_t id_ = ::getpid();
};

/// A thread, or what threads wait for. A forked child never destroys it, which would wait for threads that it lacks.
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
