// Sums of squares of gradients that arrive one after another, made by a thread of its own while others are still on
// their way: those of norm.h, to the bit.
//
//   expect    a gradient, or one more part of it, is on its way: what was known under its key is void
//   arrived   its bytes are there; counts unless something else has been expected under the key since
//   release   nothing more is to come, as far as is known, for the keys expected so far
//   take      the sums of all that has arrived
//
// A sum begins when its gradient has arrived and was released, in either order, so that a gradient which comes in
// several parts is read once, and arrived() never waits. Between expect() and the arrival of that very
// part the memory is not read here: it may be written then.
//
// Owns no gradient, but holds on to the owner that it is given with one. Threads: any. In a forked child, which lacks
// the thread, everything but the destructor throws StateError.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/optim/norm.h"

namespace hydra {

class NormAccumulator {
 public:
  using Key = const void*;
  using Owner = std::shared_ptr<const void>;
  struct Sum {
    double value = 0.0;
    Owner owner;
  };

  /// As sums_of_squares(), which it has to equal to the bit.
  using Summation = std::function<void(std::span<const NormInput>, std::span<double>)>;

  explicit NormAccumulator(Summation summation);
  /// Blocks while a gradient is being read; what was not begun is left out.
  ~NormAccumulator();
  NormAccumulator(const NormAccumulator&) = delete;
  NormAccumulator& operator=(const NormAccumulator&) = delete;

  /// Blocks while the key's memory is being read. Returns what arrived() is to be called with.
  std::int64_t expect(Key key);
  /// `owner` keeps the memory alive, and comes back with the sum.
  void arrived(Key key, std::int64_t expected, const NormInput& gradient, Owner owner);
  void release();
  /// Blocks until nothing that has arrived and was released is being read, or is going to be.
  void finish();
  /// Whether an owner is held under the key.
  bool holds(Key key);
  /// All is void, and blocks while any memory is being read.
  void forget();
  /// Releases, waits for what is under way, and forgets. Without what has not arrived, and without what the summation
  /// failed on: a caller that needs such a sum makes it, and meets the error.
  std::unordered_map<Key, Sum> take();

 private:
  struct Entry {
    std::int64_t number = 0;
    bool has_arrived = false;
    bool released = false;
    bool running = false;
    bool known = false;
    NormInput gradient{};
    Sum sum;
  };
  using Part = std::pair<Key, std::int64_t>;

  void run() noexcept;
  /// Those of the parts that are still worth summing; they run from now on.
  std::vector<Part> begin_locked(std::vector<Part> parts, std::vector<NormInput>& gradients);
  Entry* find_locked(const Part& part);
  void release_locked();

  const HomeProcess home_;
  Summation summation_;
  std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  std::unordered_map<Key, Entry> entries_;
  std::vector<Part> held_;   // expected, not released
  std::vector<Part> ready_;  // arrived and released
  std::int64_t expected_ = 0;
  bool working_ = false;
  bool stopping_ = false;
  HomeOnly<std::thread> thread_;
};

}  // namespace hydra
