#include "csrc/base/process.h"

#include <pthread.h>

#include <atomic>

namespace hydra {

namespace {

std::atomic<std::int64_t> counted_forks{0};

// Before any object of the package exists. A child of vfork() or posix_spawn() calls nothing of ours.
[[maybe_unused]] const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++counted_forks; });

}  // namespace

std::int64_t forks() noexcept { return counted_forks.load(std::memory_order_relaxed); }

}  // namespace hydra
