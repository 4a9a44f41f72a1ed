// A block for the pager's tests.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#include "csrc/paging/block_client.h"
#include "tests/cpp/support.h"

namespace hydra::test {

/// A block with a host copy of its bytes; remembers where it was published.
class FakeBlock final : public BlockClient {
 public:
  explicit FakeBlock(std::vector<std::uint8_t> host) : host_(std::move(host)) {}

  Job fill(void* slot) override {
    Job job;
    job.segments.push_back({slot, host_.data(), static_cast<Bytes>(host_.size())});
    if (refuses_fills) {
      throw std::bad_alloc();
    }
    job.after = [this] {
      if (during_fill) {
        during_fill();
      }
      ++filled;
    };
    return job;
  }
  Job write_back(void* slot) override {
    Job job;
    job.segments.push_back({host_.data(), slot, static_cast<Bytes>(host_.size())});
    job.after = during_write_back;
    return job;
  }
  void publish(void* slot) noexcept override { slot_ = slot; }
  void withdraw() noexcept override {
    EXPECT_TRUE(readable()) << "nothing was published";
    slot_ = nullptr;
  }

  bool readable() const { return slot_.load() != nullptr; }
  bool equal() const { return readable() && std::memcmp(slot_.load(), host_.data(), host_.size()) == 0; }
  std::vector<std::uint8_t>& host() { return host_; }
  std::uint8_t* slot() { return static_cast<std::uint8_t*>(slot_.load()); }

  std::function<void()> during_fill;
  std::function<void()> during_write_back;
  bool refuses_fills = false;
  std::atomic<int> filled{0};

 private:
  std::vector<std::uint8_t> host_;
  std::atomic<void*> slot_{nullptr};
};

}  // namespace hydra::test
