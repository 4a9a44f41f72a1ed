// Blocks never overlap, room that was given back is used again, and memory is there when a block is.
#include "csrc/data/shared_region.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "csrc/base/errors.h"

namespace hydra {
namespace {

constexpr Bytes kRegionBytes = 4 * kMiB;

/// Bytes that the system has given to a descriptor.
Bytes pages_of(int descriptor) {
  struct stat found{};
  EXPECT_EQ(::fstat(descriptor, &found), 0);
  return static_cast<Bytes>(found.st_blocks) * 512;
}

TEST(SharedRegion, TakesNoMemoryBeforeABlockIsMade) {
  SharedRegion region(kRegionBytes);
  EXPECT_EQ(pages_of(region.descriptor()), 0);
  EXPECT_EQ(region.allocated(), 0);
  const auto block = region.allocate(100);
  ASSERT_TRUE(block);
  EXPECT_EQ(region.used(), 128);  // whole alignments
  EXPECT_GE(pages_of(region.descriptor()), 100);
  EXPECT_EQ(pages_of(region.descriptor()), region.allocated());
}

TEST(SharedRegion, BlocksNeverOverlap) {
  SharedRegion region(kRegionBytes);
  std::mt19937 random(7);
  std::map<Bytes, Bytes> blocks;
  Bytes used = 0;
  int full = 0;
  for (int step = 0; step < 5000; ++step) {
    const Bytes size = 1 + static_cast<Bytes>(random() % (random() % 8 == 0 ? 600000 : 3000));
    if (random() % 5 < 3) {
      if (const auto begin = region.allocate(size)) {
        EXPECT_EQ(*begin % kBlockAlignment, 0);
        EXPECT_LE(*begin + size, kRegionBytes);
        const auto next = blocks.lower_bound(*begin);
        ASSERT_TRUE(next == blocks.end() || *begin + size <= next->first);
        ASSERT_TRUE(next == blocks.begin() || std::prev(next)->first + std::prev(next)->second <= *begin);
        blocks.emplace(*begin, size);
        used += round_up(size, kBlockAlignment);
        std::memset(region.data() + *begin, step % 251, static_cast<std::size_t>(size));
      } else {
        ++full;
      }
    } else if (!blocks.empty()) {
      auto gone = std::next(blocks.begin(), static_cast<std::ptrdiff_t>(random() % blocks.size()));
      region.release(gone->first);
      used -= round_up(gone->second, kBlockAlignment);
      blocks.erase(gone);
    }
    ASSERT_EQ(region.used(), used);
  }
  EXPECT_GT(full, 0);
  for (const auto& [begin, size] : blocks) {
    region.release(begin);
  }
  EXPECT_EQ(region.used(), 0);
  EXPECT_TRUE(region.allocate(kRegionBytes));  // ranges that were given back are one again
}

TEST(SharedRegion, ALimitKeepsBlocksBelowIt) {
  SharedRegion region(kRegionBytes);
  region.set_limit(kMiB);
  const auto first = region.allocate(kMiB / 2);
  ASSERT_TRUE(first);
  EXPECT_FALSE(region.allocate(kMiB));
  region.set_limit(2 * kMiB);
  const auto second = region.allocate(kMiB);
  ASSERT_TRUE(second);
  region.set_limit(kMiB / 2);  // what is there stays
  EXPECT_EQ(region.used(), 3 * kMiB / 2);
  EXPECT_FALSE(region.allocate(64));
  region.release(*second);
  EXPECT_LE(pages_of(region.descriptor()), kMiB / 2);
  region.release(*first);
  EXPECT_TRUE(region.allocate(64));
}

TEST(SharedRegion, TrimGivesBackWhatIsFreeAtTheEnd) {
  SharedRegion region(kRegionBytes);
  const auto first = region.allocate(kMiB);
  const auto second = region.allocate(kMiB);
  region.release(*first);
  region.trim();
  EXPECT_GE(region.allocated(), 2 * kMiB);  // the second is behind it
  region.release(*second);
  region.trim();
  EXPECT_EQ(region.allocated(), 0);
  EXPECT_EQ(pages_of(region.descriptor()), 0);
  EXPECT_TRUE(region.allocate(kMiB));
}

TEST(SharedRegion, AnotherProcessWritesWhatThisOneReads) {
  SharedRegion region(kRegionBytes);
  const auto block = region.allocate(1000);
  ASSERT_TRUE(block);
  const pid_t child = ::fork();
  if (child == 0) {
    void* mapped = ::mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_SHARED, region.descriptor(), 0);
    std::memset(static_cast<std::byte*>(mapped) + *block, 42, 1000);
    ::_exit(mapped == MAP_FAILED ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(std::all_of(region.data() + *block, region.data() + *block + 1000,
                          [](std::byte each) { return each == std::byte{42}; }));
}

TEST(SharedRegion, MemoryThatIsNotThereIsAnError) {
  SharedRegion region(kRegionBytes);
  const auto fits = region.allocate(kMiB / 2);
  ASSERT_TRUE(fits);
  const int whole = ::dup(region.descriptor());
  const int none = ::open("/dev/null", O_RDWR | O_CLOEXEC);  // of which no pages can be had
  ASSERT_EQ(::dup2(none, region.descriptor()), region.descriptor());
  try {
    region.allocate(2 * kMiB);
    ADD_FAILURE() << "the system has given what it has not";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::strstr(error.what(), "memory="), nullptr) << error.what();
  }
  EXPECT_EQ(region.used(), kMiB / 2);
  region.release(*fits);
  EXPECT_TRUE(region.allocate(kMiB / 2)) << "what is there serves on";
  ASSERT_EQ(::dup2(whole, region.descriptor()), region.descriptor());
  EXPECT_TRUE(region.allocate(2 * kMiB));
  ::close(whole);
  ::close(none);
}

TEST(SharedRegion, WrongCallsChangeNothing) {
  EXPECT_THROW(SharedRegion(0), StateError);
  SharedRegion region(kRegionBytes);
  EXPECT_THROW(region.allocate(0), StateError);
  EXPECT_THROW(region.release(0), StateError);
  const auto block = region.allocate(64);
  EXPECT_THROW(region.release(*block + 64), StateError);
  region.release(*block);
  EXPECT_THROW(region.release(*block), StateError);
  EXPECT_THROW(region.set_limit(kRegionBytes + kMiB), StateError);
  EXPECT_THROW(region.set_limit(-1), StateError);
  EXPECT_EQ(region.used(), 0);
}

TEST(SharedRegion, ThreadsAllocateAndReleaseAtOnce) {
  SharedRegion region(kRegionBytes);
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&region, number] {
      std::mt19937 random(static_cast<unsigned>(number));
      for (int step = 0; step < 500; ++step) {
        const Bytes size = 1 + static_cast<Bytes>(random() % 200000);
        if (const auto begin = region.allocate(size)) {
          std::memset(region.data() + *begin, number, static_cast<std::size_t>(size));
          const auto* end = region.data() + *begin + size;
          EXPECT_TRUE(std::all_of(region.data() + *begin, const_cast<std::byte*>(end),
                                  [number](std::byte each) { return each == std::byte(number); }));
          region.release(*begin);
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(region.used(), 0);
}

}  // namespace
}  // namespace hydra
