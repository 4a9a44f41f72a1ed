// Shared helpers of C++ tests: a gate between threads, byte patterns, a fence that the test opens.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/device_turns.h"
#include "csrc/base/types.h"
#include "csrc/transfer/lane.h"

namespace hydra::test {

/// Closed until opened, then open for good.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }
  /// Whether it opens within a time that is long enough for any test.
  bool opens() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [this] { return open_; });
  }
  bool is_open() {
    const std::lock_guard lock(mutex_);
    return open_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

/// Expects that a tenant that makes this wait lets another one go on meanwhile. `release` ends the wait.
inline void expect_pause(const std::function<void()>& wait, const std::function<void()>& release) {
  DeviceTurns turns([](std::optional<DeviceTurns::Tenant>, DeviceTurns::Tenant) {});
  const DeviceTurns::Tenant one = turns.admit();
  const DeviceTurns::Tenant other = turns.admit();
  Gate has_turn;
  Gate goes_on;
  std::jthread waiting([&] {
    turns.enter(one);
    has_turn.open();
    wait();
    turns.leave();
  });
  has_turn.wait();
  std::jthread going_on([&] {
    turns.enter(other);
    goes_on.open();
    turns.leave();
  });
  EXPECT_TRUE(goes_on.opens());
  release();
}

class ManualFence final : public Fence {
 public:
  bool reached() const noexcept override { return gate_.is_open(); }
  void wait() noexcept override { gate_.wait(); }
  void reach() { gate_.open(); }

 private:
  mutable Gate gate_;
};

inline std::vector<std::uint8_t> random_bytes(Bytes size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size));
  for (std::uint8_t& byte : bytes) {
    byte = static_cast<std::uint8_t>(random() & 0x7fU);  // never poison
  }
  return bytes;
}

/// The message of the ticket's error; empty if it has none.
inline std::string message_of(Ticket& ticket) {
  try {
    ticket.wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

template <class Container>
Job copy_job(void* destination, const Container& source) {
  Job job;
  job.segments.push_back(
      {.destination = destination, .source = source.data(), .bytes = static_cast<Bytes>(source.size())});
  return job;
}

}  // namespace hydra::test
