// Sums the squares of gradients as they arrive, on a thread of its own while other gradients are still on their way.
// The sums equal those of norm.h to the bit.
//
//   expect    announces a gradient, or one more part of it, and discards the sum under its key
//   arrived   tells that its bytes have arrived; ignored if the key was expected again since
//   release   tells that no more parts are known to come for the keys expected so far
//   take      returns the sums of all gradients that have arrived
//
// A sum begins when its gradient has arrived and was released, in either order. So a gradient that comes in several
// parts is read once, and arrived() never waits. Between expect() and the arrival of that part the memory is not read
// here, because it may be written then.
//
// Owns no gradient, but keeps the owner that arrived() names. Threads: any. A forked child lacks the thread: there all
// methods but holds() and the destructor throw StateError.
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

  /// Computes what sums_of_squares() computes, to the bit.
  using Summation = std::function<void(std::span<const NormInput>, std::span<double>)>;

  explicit NormAccumulator(Summation summation);
  /// Blocks while a gradient is being read. Sums that have not begun are dropped.
  ~NormAccumulator();
  NormAccumulator(const NormAccumulator&) = delete;
  NormAccumulator& operator=(const NormAccumulator&) = delete;

  /// Blocks while the key's memory is being read. Returns the number that arrived() needs.
  std::int64_t expect(Key key);
  /// `expected` is the number from expect(). `owner` keeps the memory alive, and is returned with the sum.
  void arrived(Key key, std::int64_t expected, const NormInput& gradient, Owner owner);
  void release();
  /// Blocks until every gradient that has arrived and was released is summed.
  void finish();
  /// Whether the key has an owner here.
  bool holds(Key key);
  /// Discards everything. Blocks while any memory is being read.
  void forget();
  /// Releases all keys, waits for their sums, returns them, and forgets them. Omits gradients that have not arrived,
  /// and those whose summation failed: a caller that needs such a sum computes it itself, and meets the error.
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
  /// Marks the parts that are still expected as running, and returns them. Appends their gradients.
  std::vector<Part> begin_locked(std::vector<Part> parts, std::vector<NormInput>& gradients);
  Entry* find_locked(const Part& part);
  void release_locked();

  const HomeProcess home_;
  Summation summation_;
  std::mutex mutex_;
  HomeOnly<std::condition_variable> changed_;
  std::unordered_map<Key, Entry> entries_;
  std::vector<Part> held_;   // expected and not released
  std::vector<Part> ready_;  // arrived and released
  std::int64_t expected_ = 0;
  bool working_ = false;
  bool stopping_ = false;
  HomeOnly<std::thread> thread_;
};

}  // namespace hydra
