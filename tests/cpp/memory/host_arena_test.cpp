#include "csrc/memory/host_arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "csrc/base/errors.h"
#include "tests/cpp/memory/numa_support.h"

namespace hydra {
namespace {

Bytes page() { return ::sysconf(_SC_PAGESIZE); }

/// Records pinned regions; refuses from the `refuse_from`-th call on.
class FakePinner final : public Pinner {
 public:
  bool pin(void* pointer, Bytes bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    if (++calls_ >= refuse_from) {
      return false;
    }
    pinned_[pointer] = bytes;
    return true;
  }
  void unpin(void* pointer, Bytes bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    wrong_ += pinned_.count(pointer) == 1 && pinned_[pointer] == bytes ? 0 : 1;
    pinned_.erase(pointer);
  }
  std::size_t pinned() const {
    const std::lock_guard lock(mutex_);
    return pinned_.size();
  }
  int wrong() const {
    const std::lock_guard lock(mutex_);
    return wrong_;
  }

  int refuse_from = 1000000;

 private:
  mutable std::mutex mutex_;
  std::map<void*, Bytes> pinned_;
  int calls_ = 0;
  int wrong_ = 0;
};

/// Whether a child forked now has these bytes in its address space.
bool child_inherits(void* pointer, Bytes bytes) {
  const pid_t child = ::fork();
  if (child == 0) {
    const int result = ::msync(pointer, static_cast<std::size_t>(bytes), MS_ASYNC);
    ::_exit(result == 0 ? 1 : (errno == ENOMEM ? 0 : 2));
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_LT(WEXITSTATUS(status), 2);
  return WEXITSTATUS(status) == 1;
}

TEST(HostArena, RoundsUpToTheSystemPageAndNoFurther) {
  HostArena arena;
  const std::vector<Bytes> sizes = {1, page(), page() + 1, 4 * kMiB, 5 * kMiB + 1, 33 * kMiB + 17};
  Bytes expected = 0;
  std::vector<void*> regions;
  for (const Bytes bytes : sizes) {
    regions.push_back(arena.allocate(bytes));
    expected += round_up(bytes, page());
    EXPECT_EQ(arena.mapped_bytes(), expected) << bytes;
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    arena.release(regions[i], sizes[i]);
    expected -= round_up(sizes[i], page());
    EXPECT_EQ(arena.mapped_bytes(), expected) << sizes[i];
  }
}

TEST(HostArena, AlignsLargeRegionsForHugePagesAndTouchesEveryPage) {
  HostArena arena;
  for (const Bytes bytes : {4 * kMiB, 7 * kMiB + page(), 19 * kMiB + 5}) {
    auto* const region = static_cast<unsigned char*>(arena.allocate(bytes));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(region) % static_cast<std::uintptr_t>(2 * kMiB), 0U);
    std::vector<unsigned char> resident(static_cast<std::size_t>(round_up(bytes, page()) / page()));
    ASSERT_EQ(::mincore(region, static_cast<std::size_t>(bytes), resident.data()), 0);
    for (const unsigned char present : resident) {
      ASSERT_EQ(present & 1, 1);
    }
    EXPECT_EQ(region[0], 0);
    EXPECT_EQ(region[bytes - 1], 0);
    arena.release(region, bytes);
  }
}

TEST(HostArena, GivesItsPagesBackToTheSystemAtRelease) {
  HostArena arena;
  void* const region = arena.allocate(5 * kMiB);
  arena.release(region, 5 * kMiB);
  unsigned char resident = 0;
  EXPECT_EQ(::mincore(region, 1, &resident), -1);
  EXPECT_EQ(errno, ENOMEM);
}

TEST(HostArena, WithoutAPinnerCountsNoFallBack) {
  HostArena arena;
  void* const region = arena.allocate(100);
  EXPECT_EQ(arena.pinned_bytes(), 0);
  EXPECT_EQ(arena.pageable_bytes(), 0);
  arena.release(region, 100);
}

TEST(HostArena, PinsWholeRegionsAndUnpinsThemAtRelease) {
  FakePinner pinner;
  HostArena arena(&pinner);
  void* const small = arena.allocate(100);
  void* const large = arena.allocate(6 * kMiB);
  EXPECT_EQ(pinner.pinned(), 2U);
  EXPECT_EQ(arena.pinned_bytes(), page() + 6 * kMiB);
  EXPECT_EQ(arena.pageable_bytes(), 0);
  arena.release(small, 100);
  arena.release(large, 6 * kMiB);
  EXPECT_EQ(pinner.pinned(), 0U);
  EXPECT_EQ(pinner.wrong(), 0);
  EXPECT_EQ(arena.pinned_bytes(), 0);
}

TEST(HostArena, WhenPinningFailsHandsOutPageableMemoryAndCountsIt) {
  FakePinner pinner;
  pinner.refuse_from = 2;
  HostArena arena(&pinner);
  void* const first = arena.allocate(page());
  auto* const second = static_cast<char*>(arena.allocate(3 * page()));
  EXPECT_EQ(arena.pinned_bytes(), page());
  EXPECT_EQ(arena.pageable_bytes(), 3 * page());
  std::memset(second, 1, static_cast<std::size_t>(3 * page()));
  EXPECT_TRUE(child_inherits(second, 3 * page()));
  arena.release(second, 3 * page());
  EXPECT_EQ(arena.pageable_bytes(), 0);
  arena.release(first, page());
  EXPECT_EQ(pinner.wrong(), 0);
}

TEST(HostArena, KeepsPinnedRegionsOutOfForkedChildrenUntilAllIsUnpinned) {
  FakePinner pinner;
  HostArena arena(&pinner);
  auto* const region = static_cast<char*>(arena.allocate(2 * page()));
  region[page()] = 42;
  EXPECT_FALSE(child_inherits(region, 2 * page()));
  arena.unpin_all();
  EXPECT_EQ(pinner.pinned(), 0U);
  EXPECT_EQ(arena.pinned_bytes(), 0);
  EXPECT_EQ(arena.mapped_bytes(), 2 * page());
  EXPECT_EQ(region[page()], 42);
  EXPECT_TRUE(child_inherits(region, 2 * page()));
  arena.release(region, 2 * page());
  EXPECT_EQ(pinner.wrong(), 0);
}

TEST(HostArena, WithoutAPinnerIsInheritedByForkedChildren) {
  HostArena arena;
  void* const region = arena.allocate(page());
  EXPECT_TRUE(child_inherits(region, page()));
  arena.release(region, page());
}

TEST(HostArena, InAForkedChildReleasesNothingAndRefusesToAllocate) {
  FakePinner pinner;
  HostArena arena(&pinner);
  void* const region = arena.allocate(page());
  const pid_t child = ::fork();
  if (child == 0) {
    // The child did not inherit the region. Its own mapping at that address has to survive.
    void* const own = ::mmap(region, static_cast<std::size_t>(page()), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    *static_cast<char*>(own) = 1;
    arena.release(region, page());
    arena.unpin_all();
    bool refused = false;
    try {
      arena.allocate(1);
    } catch (const StateError&) {
      refused = true;
    }
    const bool fine = *static_cast<char*>(own) == 1 && pinner.pinned() == 1 && refused;
    ::_exit(fine ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  arena.release(region, page());
}

TEST(HostArena, LiesAtItsNumaNodeAndElsewhereByTheSystemsChoice) {
  if (!test::may_prefer_nodes()) {
    GTEST_SKIP() << "the system lets this process choose no NUMA node";
  }
  HostArena near(nullptr, 0);
  HostArena anywhere;
  for (const Bytes bytes : {Bytes{1}, 3 * page(), 9 * kMiB}) {
    auto* const region = static_cast<char*>(near.allocate(bytes));
    EXPECT_TRUE(test::numa_policy_at(region)->prefers(0)) << bytes;
    EXPECT_TRUE(test::numa_policy_at(region + bytes - 1)->prefers(0)) << bytes;
    near.release(region, bytes);
    void* const other = anywhere.allocate(bytes);
    EXPECT_EQ(test::numa_policy_at(other)->mode, MPOL_DEFAULT) << bytes;
    anywhere.release(other, bytes);
  }
}

TEST(HostArena, ServesAllTheSameIfItsNodeDoesNotExist) {
  HostArena arena(nullptr, 999'999);
  void* const region = arena.allocate(100);
  std::memset(region, 1, 100);
  arena.release(region, 100);
}

TEST(NumaNode, IsTheOneThatTheSystemNames) {
  const test::FakeSysfs sysfs;
  const std::string address = "0000:3b:00.0";
  EXPECT_EQ(numa_node_of(address, sysfs.path()), std::nullopt);
  for (const auto& [text, node] : std::map<std::string, std::optional<NumaNode>>{
           {"0\n", 0}, {"13\n", 13}, {"-1\n", std::nullopt}, {"", std::nullopt}, {"none\n", std::nullopt}}) {
    sysfs.place(address, text);
    EXPECT_EQ(numa_node_of(address, sysfs.path()), node) << text;
  }
}

TEST(HostArena, IgnoresReleaseOfWhatItDoesNotHold) {
  HostArena arena;
  int other = 0;
  arena.release(&other, 4);
  EXPECT_EQ(arena.mapped_bytes(), 0);
}

TEST(HostArena, SurvivingItsOwnerUnpinsAndLeavesRegionsMapped) {
  FakePinner pinner;
  char* region = nullptr;
  {
    HostArena arena(&pinner);
    region = static_cast<char*>(arena.allocate(page()));
    region[5] = 9;
  }
  EXPECT_EQ(pinner.pinned(), 0U);
  EXPECT_EQ(region[5], 9);
  ::munmap(region, static_cast<std::size_t>(page()));
}

TEST(HostArena, PinsFromSeveralThreadsAtOnce) {
  FakePinner pinner;
  HostArena arena(&pinner);
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&arena] {
      for (int i = 0; i < 50; ++i) {
        const Bytes bytes = 1 + i * 100;
        arena.release(arena.allocate(bytes), bytes);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(arena.mapped_bytes(), 0);
  EXPECT_EQ(pinner.pinned(), 0U);
  EXPECT_EQ(pinner.wrong(), 0);
}

}  // namespace
}  // namespace hydra
