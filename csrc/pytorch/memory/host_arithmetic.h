// Additions and conversions of numbers on the host, for the functions of the lanes' jobs. Threads share each call,
// because one thread is several times slower than a device's link.
//
// Each number has the bits that torch's own loop gives it in one call on one thread, and meets the same vector of that
// loop. What torch allocates meanwhile is charged to no account.
//
// Owns its threads. They start with the first call that is worth sharing, and end with this object. Calls block, and
// calls from several threads run one after the other. The interpreter lock is not needed. A forked child starts threads
// of its own (ThreadPool).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "csrc/base/thread_pool.h"

namespace hydra {

/// The first of several numbers, which lie in host memory without gaps.
struct HostNumbers {
  std::byte* begin = nullptr;
  c10::ScalarType dtype = c10::kFloat;
};

class HostArithmetic {
 public:
  /// Shares calls among as many threads as torch computes with now, but not among more than can have a part of a landed
  /// piece of gradients (LandingRing).
  HostArithmetic();

  /// Converts `count` numbers of `from` to the dtype of `to`.
  void convert(const HostNumbers& to, const HostNumbers& from, std::int64_t count);
  /// Adds `count` numbers of `from`, in the dtype of `to`.
  void add(const HostNumbers& to, const HostNumbers& from, std::int64_t count);

 private:
  using Loop = void (*)(const HostNumbers& to, const HostNumbers& from, std::int64_t count);

  void share(Loop loop, const HostNumbers& to, const HostNumbers& from, std::int64_t count);

  ThreadPool threads_;
};

}  // namespace hydra
