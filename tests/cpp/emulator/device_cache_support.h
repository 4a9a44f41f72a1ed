// What the tests of the caching allocator's model share: a cache on a small machine with two streams, and looks at its
// layout and its bytes.
//
// Threads: a test's own. Sizes are bytes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <latch>
#include <utility>
#include <vector>

#include "emulator/c10_cuda/device_cache.h"
#include "emulator/cudart/control.h"

namespace emulated_cuda::cache_test {

inline constexpr std::size_t kKiB = 1024;
inline constexpr std::size_t kMiB = 1024 * kKiB;
inline constexpr std::size_t kDeviceBytes = 128 * kMiB;
inline constexpr std::byte kPoison{0xFF};

/// A cache of device 0 of a machine with two devices. At the end all is freed, and nothing is left over.
class DeviceCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    configure({.devices = 2, .bytes = kDeviceBytes});
    a_ = make_stream();
    b_ = make_stream();
  }

  void TearDown() override {
    EXPECT_FALSE(wrong_device());
    for (const auto& [pointer, freed] : allocations_) {
      if (!freed) {
        cache_.free(pointer);
      }
    }
    cache_.release_cached();
    EXPECT_EQ(cache_.stats().reserved_bytes[0].current, 0);
    EXPECT_EQ(emulated_cuda::allocations(), 0U);
    EXPECT_EQ(events(), 0);
    EXPECT_EQ(cudaStreamDestroy(a_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(b_), cudaSuccess);
    reset();
    configure({});
  }

  static cudaStream_t make_stream() {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    return stream;
  }

  std::byte* allocate(std::size_t bytes, cudaStream_t stream) {
    void* const pointer = cache_.allocate(bytes, stream);
    allocations_.emplace_back(pointer, false);
    return static_cast<std::byte*>(pointer);
  }
  std::byte* allocate(std::size_t bytes) { return allocate(bytes, a_); }

  void free(void* pointer) {
    cache_.free(pointer);
    const auto known = std::ranges::find(allocations_, std::pair{pointer, false});
    ASSERT_NE(known, allocations_.end());
    known->second = true;
  }

  std::int64_t reserved() const { return cache_.stats().reserved_bytes[0].current; }

  /// The block at an address; of no bytes if there is none.
  CacheBlock block_at(const std::byte* address) const {
    for (const CacheSegment& segment : cache_.snapshot()) {
      for (const CacheBlock& block : segment.blocks) {
        if (block.address == address) {
          return block;
        }
      }
    }
    return {};
  }

  /// The bytes of each segment's blocks, free ones negative.
  std::vector<std::vector<std::int64_t>> layout() const {
    std::vector<std::vector<std::int64_t>> segments;
    for (const CacheSegment& segment : cache_.snapshot()) {
      segments.emplace_back();
      for (const CacheBlock& block : segment.blocks) {
        segments.back().push_back(block.active ? static_cast<std::int64_t>(block.bytes)
                                               : -static_cast<std::int64_t>(block.bytes));
      }
    }
    return segments;
  }

  bool missed() {
    ++misses_;
    return on_miss_ && on_miss_();
  }

  bool expandable_ = false;
  int misses_ = 0;
  std::function<bool()> on_miss_;
  cudaStream_t a_ = nullptr;
  cudaStream_t b_ = nullptr;
  std::vector<std::pair<void*, bool>> allocations_;  // and whether each was freed
  DeviceCache cache_{0, {.on_miss = [this] { return missed(); }, .expandable = [this] { return expandable_; }}};
};

inline std::vector<std::byte> read(const std::byte* from, std::size_t bytes, cudaStream_t stream) {
  std::vector<std::byte> to(bytes);
  EXPECT_EQ(cudaMemcpyAsync(to.data(), from, bytes, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  return to;
}

inline bool all_are(const std::vector<std::byte>& bytes, std::byte value) {
  return std::ranges::all_of(bytes, [value](std::byte byte) { return byte == value; });
}

/// Holds a stream up until the gate is opened.
inline void hold_up(cudaStream_t stream, std::latch& gate) {
  ASSERT_EQ(launch(stream, [&gate] { gate.wait(); }), cudaSuccess);
}

}  // namespace emulated_cuda::cache_test
