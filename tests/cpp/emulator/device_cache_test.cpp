// The model of torch's caching allocator alone: sizes, the choice of a block, what a miss does, expandable segments.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/emulator/device_cache_support.h"

namespace emulated_cuda::cache_test {

namespace {

// ---- sizes ----------------------------------------------------------------------------------------------------------

struct Size {
  std::size_t request;
  std::size_t block;
  std::size_t segment;
};

class DeviceCacheSizes : public DeviceCacheTest, public ::testing::WithParamInterface<Size> {};

TEST_P(DeviceCacheSizes, AreRounded) {
  const Size& size = GetParam();
  const std::byte* const pointer = allocate(size.request);
  EXPECT_EQ(block_at(pointer).bytes, size.block);
  EXPECT_EQ(block_at(pointer).requested, size.request);
  EXPECT_EQ(static_cast<std::size_t>(reserved()), size.segment);
  const CacheStats stats = cache_.stats();
  const std::size_t own = size.segment == 2 * kMiB ? 1 : 2;
  for (const std::size_t which : {std::size_t{0}, own}) {
    EXPECT_EQ(static_cast<std::size_t>(stats.allocated_bytes[which].current), size.block);
    EXPECT_EQ(static_cast<std::size_t>(stats.requested_bytes[which].current), size.request);
    EXPECT_EQ(stats.segments[which].current, 1);
  }
  EXPECT_EQ(stats.allocated_bytes[3 - own].current, 0);
}

INSTANTIATE_TEST_SUITE_P(Table, DeviceCacheSizes,
                         ::testing::Values(Size{1, 512, 2 * kMiB}, Size{512, 512, 2 * kMiB}, Size{513, 1024, 2 * kMiB},
                                           Size{kMiB, kMiB, 2 * kMiB}, Size{kMiB + 1, kMiB + 512, 20 * kMiB},
                                           Size{10 * kMiB - 512, 10 * kMiB - 512, 20 * kMiB},
                                           Size{10 * kMiB - 511, 10 * kMiB, 10 * kMiB},
                                           Size{10 * kMiB, 10 * kMiB, 10 * kMiB},
                                           Size{10 * kMiB + 1, 10 * kMiB + 512, 12 * kMiB},
                                           Size{11 * kMiB, 12 * kMiB, 12 * kMiB}, Size{12 * kMiB, 12 * kMiB, 12 * kMiB},
                                           Size{33 * kMiB, 34 * kMiB, 34 * kMiB}));

TEST_F(DeviceCacheTest, SmallBlocksAreSplitDownTo512Bytes) {
  allocate(kMiB);
  allocate(kMiB - 512);
  EXPECT_EQ(layout(), (std::vector<std::vector<std::int64_t>>{{kMiB, kMiB - 512, -512}}));
  allocate(512);
  EXPECT_EQ(layout(), (std::vector<std::vector<std::int64_t>>{{kMiB, kMiB - 512, 512}}));
}

TEST_F(DeviceCacheTest, LargeBlocksAreSplitOnlyAboveOneMebibyte) {
  const std::size_t more_than_half = 9 * kMiB + kMiB / 2;
  allocate(more_than_half);
  EXPECT_EQ(layout(), (std::vector<std::vector<std::int64_t>>{{static_cast<std::int64_t>(more_than_half),
                                                               -static_cast<std::int64_t>(10 * kMiB + kMiB / 2)}}));
  allocate(more_than_half);  // would leave exactly 1 MiB
  EXPECT_EQ(layout(), (std::vector<std::vector<std::int64_t>>{{static_cast<std::int64_t>(more_than_half),
                                                               static_cast<std::int64_t>(10 * kMiB + kMiB / 2)}}));
}

// ---- the choice of a block ------------------------------------------------------------------------------------------

TEST_F(DeviceCacheTest, TheSmallestBlockThatFitsIsTaken) {
  std::byte* const large = allocate(64 * kKiB);
  allocate(512);
  std::byte* const middle = allocate(16 * kKiB);
  allocate(512);
  std::byte* const small = allocate(4 * kKiB);
  allocate(512);
  free(large);
  free(middle);
  free(small);
  EXPECT_EQ(allocate(16 * kKiB), middle);
  EXPECT_EQ(allocate(5 * kKiB), large);
  EXPECT_EQ(allocate(4 * kKiB), small);
}

TEST_F(DeviceCacheTest, TheLowestOfEqualBlocksIsTaken) {
  std::byte* const low = allocate(4 * kKiB);
  allocate(512);
  std::byte* const high = allocate(4 * kKiB);
  allocate(512);
  free(high);
  free(low);
  EXPECT_EQ(allocate(4 * kKiB), std::min(low, high));
}

TEST_F(DeviceCacheTest, FreeNeighboursBecomeOneBlockInEveryOrder) {
  std::vector<std::size_t> order = {0, 1, 2, 3};
  do {
    std::vector<std::byte*> parts;
    for (std::size_t i = 0; i < order.size(); ++i) {
      parts.push_back(allocate(512 * kKiB));
    }
    for (const std::size_t i : order) {
      free(parts[i]);
    }
    ASSERT_EQ(layout(), (std::vector<std::vector<std::int64_t>>{{-static_cast<std::int64_t>(2 * kMiB)}}));
  } while (std::ranges::next_permutation(order).found);
}

TEST_F(DeviceCacheTest, BlocksOfDifferentSegmentsStayApart) {
  std::byte* const first = allocate(20 * kMiB);
  std::byte* const second = allocate(20 * kMiB);
  free(first);
  free(second);
  EXPECT_EQ(layout().size(), 2U);
}

TEST_F(DeviceCacheTest, FreedBytesBelongToTheirStream) {
  std::byte* const pointer = allocate(kMiB, a_);
  free(pointer);
  EXPECT_NE(allocate(kMiB, b_), pointer);
  EXPECT_EQ(allocate(kMiB, a_), pointer);
  EXPECT_EQ(misses_, 2);
}

TEST_F(DeviceCacheTest, SmallAndLargeRequestsHaveTheirOwnSegments) {
  free(allocate(20 * kMiB));
  allocate(512);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(22 * kMiB));
}

// ---- a miss ---------------------------------------------------------------------------------------------------------

TEST_F(DeviceCacheTest, AMissAsksOnceAndAHitNever) {
  free(allocate(kMiB));
  EXPECT_EQ(misses_, 1);
  allocate(kMiB);
  EXPECT_EQ(misses_, 1);
  allocate(2 * kMiB);
  EXPECT_EQ(misses_, 2);
}

TEST_F(DeviceCacheTest, WhatTheCallbackFreesIsUsedBeforeNewMemory) {
  std::byte* const victim = allocate(16 * kMiB);
  on_miss_ = [&] {
    free(victim);
    return true;
  };
  EXPECT_EQ(allocate(16 * kMiB), victim);
  EXPECT_EQ(cache_.stats().device_allocations, 1);
}

TEST_F(DeviceCacheTest, WhatTheCallbackFreesIsNotLookedForIfItSaysNo) {
  std::byte* const victim = allocate(16 * kMiB);
  on_miss_ = [&] {
    free(victim);
    return false;
  };
  EXPECT_NE(allocate(16 * kMiB), victim);
}

TEST_F(DeviceCacheTest, TheLockIsHeldDuringTheCallbackAndIsRecursive) {
  std::atomic<bool> passed = false;
  std::thread other;
  on_miss_ = [&] {
    EXPECT_EQ(cache_.stats().allocations[0].current, 0);
    other = std::thread([&] {
      static_cast<void>(cache_.stats());
      passed = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(passed);
    return false;
  };
  allocate(kMiB);
  other.join();
  EXPECT_TRUE(passed);
}

TEST_F(DeviceCacheTest, TheLimitCountsReservedBytes) {
  cache_.set_memory_fraction(40.0 * kMiB / kDeviceBytes);
  EXPECT_EQ(cache_.memory_fraction(), 40.0 * kMiB / kDeviceBytes);
  allocate(2 * kMiB);  // reserves 20 MiB
  allocate(20 * kMiB);
  EXPECT_THROW(allocate(512), CacheExhausted);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(40 * kMiB));
  EXPECT_EQ(cache_.stats().allocated_bytes[0].current, static_cast<std::int64_t>(22 * kMiB));
}

TEST_F(DeviceCacheTest, TheCacheIsReturnedBeforeARequestFails) {
  cache_.set_memory_fraction(40.0 * kMiB / kDeviceBytes);
  std::byte* const first = allocate(20 * kMiB, a_);
  std::byte* const second = allocate(20 * kMiB, a_);
  free(first);
  free(second);
  std::vector<std::int64_t> reserved_at_the_miss;
  on_miss_ = [&] {
    reserved_at_the_miss.push_back(reserved());
    return false;
  };
  allocate(30 * kMiB, b_);
  EXPECT_EQ(reserved_at_the_miss, std::vector<std::int64_t>{static_cast<std::int64_t>(40 * kMiB)});
  const CacheStats stats = cache_.stats();
  EXPECT_EQ(stats.retries, 1);
  EXPECT_EQ(stats.failures, 0);
  EXPECT_EQ(stats.waits, 1);
  EXPECT_EQ(stats.device_frees, 2);
  EXPECT_EQ(stats.reserved_bytes[0].current, static_cast<std::int64_t>(30 * kMiB));
}

TEST_F(DeviceCacheTest, ASplitSegmentIsNotReturned) {
  free(allocate(4 * kMiB));
  std::byte* const kept = allocate(4 * kMiB);
  free(allocate(4 * kMiB));
  cache_.release_cached();
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(20 * kMiB));
  free(kept);
  cache_.release_cached();
  EXPECT_EQ(reserved(), 0);
}

TEST_F(DeviceCacheTest, AFailureNamesTheFiguresAndIsCounted) {
  cache_.set_memory_fraction(0.25);
  allocate(20 * kMiB);
  try {
    allocate(kMiB + 1);
    FAIL() << "the request is beyond the limit";
  } catch (const CacheExhausted& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 128.00 MiB"),
              0U)
        << text;
    EXPECT_NE(text.find("of which 108.00 MiB is free. 32.00 MiB allowed; "), std::string::npos) << text;
    EXPECT_NE(text.find("Of the allocated memory 20.00 MiB is allocated by PyTorch"), std::string::npos) << text;
  }
  EXPECT_EQ(cache_.stats().failures, 1);
  EXPECT_EQ(cache_.stats().retries, 1);
  EXPECT_EQ(misses_, 2);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

TEST_F(DeviceCacheTest, AFullDeviceFailsWithoutALimit) {
  allocate(100 * kMiB);
  EXPECT_THROW(allocate(40 * kMiB), CacheExhausted);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_EQ(cache_.memory_fraction(), 1.0);
}

TEST_F(DeviceCacheTest, AnotherErrorOfTheDeviceIsReportedAtOnce) {
  free(allocate(kMiB));
  fail("cudaMalloc", cudaErrorLaunchTimeout);
  try {
    allocate(20 * kMiB);
    FAIL() << "cudaMalloc has failed";
  } catch (const runtime::CudaFailure& error) {
    EXPECT_EQ(error.status(), cudaErrorLaunchTimeout);
  }
  EXPECT_EQ(cache_.stats().device_frees, 0);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  allocate(20 * kMiB);
}

TEST_F(DeviceCacheTest, AnErrorThatWasLeftBehindIsReportedWhenMemoryIsAsked) {
  free(allocate(kMiB));
  EXPECT_NE(cudaSetDevice(99), cudaSuccess);
  allocate(kMiB);
  EXPECT_THROW(allocate(20 * kMiB), runtime::CudaFailure);
}

TEST_F(DeviceCacheTest, UnderTheClockFreedMemoryTakesNoTime) {
  start_clock({.device_memory = 1.0, .call_seconds = 1.0});
  const ClockReport before = clock_report();
  free(allocate(kMiB));
  const ClockReport after = clock_report();
  EXPECT_EQ(after.busy, before.busy);
  stop_clock();
}

// ---- expandable segments --------------------------------------------------------------------------------------------

TEST_F(DeviceCacheTest, AnExpandableSegmentGrowsByPages) {
  expandable_ = true;
  std::byte* const first = allocate(2 * kMiB);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(20 * kMiB));
  EXPECT_EQ(allocate(18 * kMiB), first + 2 * kMiB);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(20 * kMiB));
  EXPECT_EQ(allocate(50 * kMiB), first + 20 * kMiB);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(80 * kMiB));
  allocate(512);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(82 * kMiB));
  EXPECT_EQ(cache_.stats().segments[0].current, 0);
  EXPECT_EQ(cache_.snapshot().size(), 2U);
  EXPECT_TRUE(cache_.snapshot().front().expandable);
}

TEST_F(DeviceCacheTest, AFreeEndOfAnExpandableSegmentIsPartOfWhatComesNext) {
  expandable_ = true;
  std::byte* const first = allocate(2 * kMiB);
  EXPECT_EQ(allocate(30 * kMiB), first + 2 * kMiB);  // 18 MiB are there, 12 are not
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(40 * kMiB));
}

TEST_F(DeviceCacheTest, LargeBlocksOfExpandableSegmentsAreSplitDownTo512Bytes) {
  expandable_ = true;
  allocate(20 * kMiB - 512);
  EXPECT_EQ(layout(), (std::vector<std::vector<std::int64_t>>{{20 * kMiB - 512, -512}}));
}

TEST_F(DeviceCacheTest, WholeFreePagesAreUnmappedAndFilledAgain) {
  expandable_ = true;
  std::byte* const low = allocate(10 * kMiB);
  std::byte* const middle = allocate(50 * kMiB);
  std::byte* const high = allocate(10 * kMiB);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(80 * kMiB));
  free(middle);
  cache_.release_cached();  // of [10, 60) MiB, the pages [20, 60) are free; of [70, 80), none is
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(40 * kMiB));
  EXPECT_EQ(layout(), (std::vector<std::vector<std::int64_t>>{{10 * kMiB, -static_cast<std::int64_t>(10 * kMiB)},
                                                              {10 * kMiB, -static_cast<std::int64_t>(10 * kMiB)}}));
  EXPECT_EQ(allocate(40 * kMiB), low + 10 * kMiB) << "the gap is the lowest place";
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(80 * kMiB));
  EXPECT_EQ(block_at(high).bytes, 10 * kMiB);
}

TEST_F(DeviceCacheTest, AFreeExpandableSegmentIsReturnedWhole) {
  expandable_ = true;
  free(allocate(50 * kMiB));
  EXPECT_EQ(cache_.stats().device_allocations, 1);
  cache_.release_cached();
  EXPECT_EQ(reserved(), 0);
  EXPECT_TRUE(cache_.snapshot().empty());
  allocate(50 * kMiB);
}

TEST_F(DeviceCacheTest, AnExpandableSegmentServesOneStream) {
  expandable_ = true;
  cache_.set_memory_fraction(100.0 * kMiB / kDeviceBytes);
  free(allocate(80 * kMiB, a_));
  allocate(60 * kMiB, b_);  // the first stream's pages go to the second
  EXPECT_EQ(cache_.stats().retries, 1);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(60 * kMiB));
}

TEST_F(DeviceCacheTest, AFullDeviceCannotBeMapped) {
  expandable_ = true;
  allocate(100 * kMiB);
  EXPECT_THROW(allocate(40 * kMiB), CacheExhausted);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(100 * kMiB));
}

TEST_F(DeviceCacheTest, SwitchedOffExpandableSegmentsServeNothing) {
  expandable_ = true;
  std::byte* const grown = allocate(20 * kMiB);
  free(grown);
  expandable_ = false;
  EXPECT_NE(allocate(20 * kMiB), grown);
  EXPECT_EQ(reserved(), static_cast<std::int64_t>(40 * kMiB));
  expandable_ = true;
  EXPECT_EQ(allocate(20 * kMiB), grown);
}

TEST_F(DeviceCacheTest, ABlockThatCanGrowCountsAsLarge) {
  expandable_ = true;
  std::byte* const inner = allocate(20 * kMiB);
  allocate(20 * kMiB);
  std::byte* const last = allocate(10 * kMiB);  // the other 10 MiB of its page are free, and can grow
  free(inner);
  EXPECT_EQ(allocate(8 * kMiB), inner) << "not the smaller block that can grow";
  EXPECT_EQ(block_at(last + 10 * kMiB).bytes, 10 * kMiB);
}

TEST_F(DeviceCacheTest, AFailedDeviceTakesPagesBack) {
  expandable_ = true;
  free(allocate(50 * kMiB));
  set_fault(0, cudaErrorIllegalAddress);
  EXPECT_THROW(cache_.release_cached(), runtime::CudaFailure);
  reset();
  EXPECT_EQ(reserved(), 0);
  allocate(50 * kMiB);
}

}  // namespace

}  // namespace emulated_cuda::cache_test
