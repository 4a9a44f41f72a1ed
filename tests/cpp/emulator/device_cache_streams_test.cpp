// The model of torch's caching allocator alone: blocks that several streams use, poison, figures and errors.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/cpp/emulator/device_cache_support.h"

namespace emulated_cuda::cache_test {

namespace {

// ---- other streams --------------------------------------------------------------------------------------------------

TEST_F(DeviceCacheTest, ABlockWaitsForTheStreamsThatUseIt) {
  std::latch gate(1);
  std::byte* const pointer = allocate(kMiB);
  cache_.record_stream(pointer, 0, b_);
  hold_up(b_, gate);
  free(pointer);
  EXPECT_TRUE(block_at(pointer).active);
  EXPECT_FALSE(block_at(pointer).allocated);
  EXPECT_EQ(cache_.stats().allocated_bytes[0].current, 0);
  EXPECT_EQ(cache_.stats().active_bytes[0].current, static_cast<std::int64_t>(kMiB));
  EXPECT_NE(allocate(kMiB), pointer);
  gate.count_down();
  ASSERT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  EXPECT_TRUE(block_at(pointer).active) << "only an allocation looks at events";
  EXPECT_EQ(allocate(kMiB), pointer);
}

TEST_F(DeviceCacheTest, OnlyWorkBeforeTheFreeIsWaitedFor) {
  std::latch gate(1);
  std::byte* const pointer = allocate(kMiB);
  cache_.record_stream(pointer, 0, b_);
  free(pointer);
  ASSERT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  hold_up(b_, gate);
  EXPECT_EQ(allocate(kMiB), pointer);
  gate.count_down();
}

TEST_F(DeviceCacheTest, UseOnTheBlocksOwnStreamNeedsNoWait) {
  std::latch gate(1);
  std::byte* const pointer = allocate(kMiB);
  cache_.record_stream(pointer, 0, a_);
  hold_up(a_, gate);
  free(pointer);
  EXPECT_EQ(allocate(kMiB), pointer);
  gate.count_down();
}

TEST_F(DeviceCacheTest, AReleaseWaitsForOtherStreams) {
  std::latch gate(1);
  std::byte* const pointer = allocate(kMiB);
  cache_.record_stream(pointer, 0, b_);
  hold_up(b_, gate);
  free(pointer);
  std::thread opener([&gate] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.count_down();
  });
  cache_.release_cached();
  EXPECT_TRUE(gate.try_wait());
  EXPECT_EQ(reserved(), 0);
  opener.join();
}

TEST_F(DeviceCacheTest, AStreamOfAnotherDeviceCanUseABlock) {
  std::latch gate(1);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const cudaStream_t far = make_stream();
  hold_up(far, gate);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  std::byte* const pointer = allocate(kMiB);
  cache_.record_stream(pointer, 1, far);
  free(pointer);
  EXPECT_NE(allocate(kMiB), pointer);
  gate.count_down();
  cache_.release_cached();
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(far), cudaSuccess);
  free(allocations_.back().first);  // from another device's thread
  int device = -1;
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 1);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

// ---- poison ---------------------------------------------------------------------------------------------------------

TEST_F(DeviceCacheTest, FreedBytesArePoisonedAfterTheWorkBeforeTheFree) {
  std::latch gate(1);
  std::byte* const pointer = allocate(1000);
  ASSERT_EQ(cudaMemsetAsync(pointer, 7, 1024, a_), cudaSuccess);
  hold_up(a_, gate);
  std::vector<std::byte> seen(1024);
  ASSERT_EQ(launch(a_, [&] { std::memcpy(seen.data(), pointer, seen.size()); }), cudaSuccess);
  free(pointer);
  EXPECT_EQ(allocate(1000), pointer);
  gate.count_down();
  EXPECT_TRUE(all_are(read(pointer, 1024, a_), kPoison));
  EXPECT_TRUE(all_are(seen, std::byte{7}));
}

TEST_F(DeviceCacheTest, NeighboursAreNotPoisoned) {
  std::byte* const low = allocate(512);
  std::byte* const middle = allocate(512);
  std::byte* const high = allocate(512);
  ASSERT_EQ(cudaMemsetAsync(low, 1, 3 * 512, a_), cudaSuccess);
  free(low);
  free(high);
  free(middle);
  EXPECT_TRUE(all_are(read(low, 3 * 512, a_), kPoison));
  std::byte* const again = allocate(512);
  std::byte* const kept = allocate(512);
  ASSERT_EQ(cudaMemsetAsync(kept, 2, 512, a_), cudaSuccess);
  free(again);
  EXPECT_TRUE(all_are(read(kept, 512, a_), std::byte{2}));
}

TEST_F(DeviceCacheTest, AStreamThatIsRecordedReadsNoPoison) {
  std::latch gate(1);
  std::byte* const pointer = allocate(512);
  ASSERT_EQ(cudaMemsetAsync(pointer, 7, 512, a_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  cache_.record_stream(pointer, 0, b_);
  hold_up(b_, gate);
  std::vector<std::byte> seen(512);
  ASSERT_EQ(launch(b_, [&] { std::memcpy(seen.data(), pointer, seen.size()); }), cudaSuccess);
  free(pointer);
  ASSERT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  gate.count_down();
  ASSERT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  EXPECT_TRUE(all_are(seen, std::byte{7}));
  EXPECT_EQ(allocate(512), pointer);
  EXPECT_TRUE(all_are(read(pointer, 512, a_), kPoison));
}

TEST_F(DeviceCacheTest, AStreamThatIsNotRecordedReadsPoison) {
  std::latch gate(1);
  std::byte* const pointer = allocate(512);
  ASSERT_EQ(cudaMemsetAsync(pointer, 7, 512, a_), cudaSuccess);
  hold_up(b_, gate);
  std::vector<std::byte> seen(512);
  ASSERT_EQ(launch(b_, [&] { std::memcpy(seen.data(), pointer, seen.size()); }), cudaSuccess);
  free(pointer);
  ASSERT_EQ(cudaStreamSynchronize(a_), cudaSuccess);
  gate.count_down();
  ASSERT_EQ(cudaStreamSynchronize(b_), cudaSuccess);
  EXPECT_TRUE(all_are(seen, kPoison));
}

// ---- figures and errors ---------------------------------------------------------------------------------------------

TEST_F(DeviceCacheTest, PeaksAndTotalsAreReset) {
  std::byte* const pointer = allocate(kMiB);
  free(allocate(kMiB));
  free(allocate(512));
  EXPECT_EQ(cache_.stats().allocated_bytes[0].peak, static_cast<std::int64_t>(2 * kMiB));
  EXPECT_EQ(block_at(pointer + kMiB).requested, 0U);
  cache_.reset_peaks();
  CacheStats stats = cache_.stats();
  EXPECT_EQ(stats.allocated_bytes[0].peak, static_cast<std::int64_t>(kMiB));
  EXPECT_EQ(stats.reserved_bytes[0].peak, static_cast<std::int64_t>(2 * kMiB));
  EXPECT_EQ(stats.allocated_bytes[0].added, static_cast<std::int64_t>(2 * kMiB + 512));
  EXPECT_EQ(stats.allocated_bytes[0].removed, static_cast<std::int64_t>(kMiB + 512));
  EXPECT_EQ(stats.allocations[1].added, 3);
  cache_.reset_totals();
  stats = cache_.stats();
  EXPECT_EQ(stats.allocated_bytes[0].added, 0);
  EXPECT_EQ(stats.allocated_bytes[0].current, static_cast<std::int64_t>(kMiB));
  EXPECT_EQ(stats.device_allocations, 0);
  EXPECT_EQ(cache_.largest_free(), kMiB);
  free(pointer);
  EXPECT_EQ(cache_.stats().active_blocks[0].current, 0);
  EXPECT_EQ(cache_.stats().requested_bytes[0].current, 0);
}

TEST_F(DeviceCacheTest, WhatIsNoAllocationCannotBeFreed) {
  std::byte* const pointer = allocate(kMiB);
  EXPECT_THROW(cache_.free(pointer + 512), std::invalid_argument);
  free(pointer);
  EXPECT_THROW(cache_.free(pointer), std::invalid_argument);
  EXPECT_THROW(cache_.record_stream(pointer, 0, b_), std::invalid_argument);
}

TEST_F(DeviceCacheTest, AFailedDeviceRefusesMemoryAndTakesItBack) {
  std::byte* const pointer = allocate(kMiB);
  free(allocate(20 * kMiB));
  set_fault(0, cudaErrorIllegalAddress);
  EXPECT_THROW(allocate(40 * kMiB), runtime::CudaFailure);
  free(pointer);
  EXPECT_THROW(cache_.release_cached(), runtime::CudaFailure);
  reset();
  allocate(20 * kMiB);
}

TEST_F(DeviceCacheTest, MemoryIsGivenToAStreamThatIsCaptured) {
  std::byte* const pointer = allocate(kMiB);
  cache_.record_stream(pointer, 0, b_);
  free(pointer);
  set_capturing(a_, true);
  allocate(20 * kMiB);
  set_capturing(a_, false);
}

TEST_F(DeviceCacheTest, AScriptedFailureOfAKernelIsLeftToKernels) {
  fail("cudaLaunchKernel", cudaErrorLaunchTimeout);
  free(allocate(kMiB));
  EXPECT_EQ(launch(a_, [] {}), cudaErrorLaunchTimeout);
  static_cast<void>(cudaGetLastError());
}

}  // namespace

}  // namespace emulated_cuda::cache_test
