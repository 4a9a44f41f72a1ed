// The contract of every Resource, and the features of each adaptor.
#include "csrc/memory/resource.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "csrc/base/errors.h"
#include "csrc/memory/host_arena.h"
#include "csrc/memory/limited_resource.h"
#include "csrc/memory/tracked_resource.h"

namespace hydra {
namespace {

struct Heap {
  HeapResource resource;
};
struct Arena {
  HostArena resource;
};
struct Limited {
  HeapResource heap;
  Ledger ledger{256 * kMiB};
  LimitedResource resource{heap, ledger, MemoryClass::kWeights};
};
struct Tracked {
  HeapResource heap;
  TrackedResource resource{heap};
};

template <class Case>
class ResourceContract : public ::testing::Test {
 protected:
  Case case_;
};
using Cases = ::testing::Types<Heap, Arena, Limited, Tracked>;
TYPED_TEST_SUITE(ResourceContract, Cases);

TYPED_TEST(ResourceContract, HandsOutAlignedMemoryOfTheSizeAsked) {
  Resource& resource = this->case_.resource;
  for (const Bytes bytes : {Bytes{1}, Bytes{511}, Bytes{4096}, Bytes{70001}, 5 * kMiB + 3}) {
    void* const pointer = resource.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pointer) % kPageAlignment, 0U);
    std::memset(pointer, 0x5a, static_cast<std::size_t>(bytes));
    resource.release(pointer, bytes);
  }
}

TYPED_TEST(ResourceContract, GivesDisjointMemoryToEveryHolder) {
  Resource& resource = this->case_.resource;
  std::vector<void*> held;
  for (int i = 0; i < 20; ++i) {
    held.push_back(resource.allocate(1000));
    std::memset(held.back(), i, 1000);
  }
  for (std::size_t i = 0; i < held.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(held[i]);
    EXPECT_EQ(bytes[0], i);
    EXPECT_EQ(bytes[999], i);
    resource.release(held[i], 1000);
  }
}

TYPED_TEST(ResourceContract, ThrowsOutOfMemoryForWhatNobodyHasAndGoesOn) {
  Resource& resource = this->case_.resource;
  EXPECT_THROW(resource.allocate(std::numeric_limits<Bytes>::max() / 4), OutOfMemory);
  EXPECT_THROW(resource.allocate(std::numeric_limits<Bytes>::max()), OutOfMemory);
  resource.release(resource.allocate(64), 64);
}

TYPED_TEST(ResourceContract, RefusesSizesBelowOne) {
  EXPECT_THROW(this->case_.resource.allocate(0), StateError);
  EXPECT_THROW(this->case_.resource.allocate(-1), StateError);
}

TYPED_TEST(ResourceContract, ServesFourThreadsAtOnce) {
  Resource& resource = this->case_.resource;
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&resource, thread] {
      for (int i = 0; i < 100; ++i) {
        const Bytes bytes = 100 + i;
        auto* const pointer = static_cast<char*>(resource.allocate(bytes));
        std::memset(pointer, thread, static_cast<std::size_t>(bytes));
        EXPECT_EQ(pointer[bytes - 1], thread);
        resource.release(pointer, bytes);
      }
    });
  }
}

/// Refuses every allocation, as a full upstream does.
class Exhausted final : public Resource {
 public:
  void* allocate(Bytes /*bytes*/) override {
    ++asked;
    throw OutOfMemory("nothing left");
  }
  void release(void* /*pointer*/, Bytes /*bytes*/) noexcept override {}
  int asked = 0;
};

TEST(LimitedResource, ChargesWhileHeldAndDischargesAtRelease) {
  HeapResource heap;
  Ledger ledger(1000);
  LimitedResource limited(heap, ledger, MemoryClass::kGradients);
  void* const pointer = limited.allocate(700);
  EXPECT_EQ(ledger.in_use(MemoryClass::kGradients), 700);
  limited.release(pointer, 700);
  EXPECT_EQ(ledger.in_use(), 0);
}

TEST(LimitedResource, OverTheBudgetSaysWhatWasAskedAndHeldAndDoesNotAskUpstream) {
  Exhausted upstream;
  Ledger ledger(1000);
  ASSERT_TRUE(ledger.try_charge(MemoryClass::kWeights, 400));
  LimitedResource limited(upstream, ledger, MemoryClass::kActivations);
  try {
    limited.allocate(601);
    FAIL() << "went over the budget";
  } catch (const OutOfMemory& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("601 bytes of activations"), std::string::npos) << message;
    EXPECT_NE(message.find("400 bytes in use"), std::string::npos) << message;
    EXPECT_NE(message.find("1000 bytes"), std::string::npos) << message;
  }
  EXPECT_EQ(upstream.asked, 0);
  EXPECT_EQ(ledger.in_use(), 400);
}

TEST(LimitedResource, GivesItsChargeBackWhenUpstreamFails) {
  Exhausted upstream;
  Ledger ledger(1000);
  LimitedResource limited(upstream, ledger, MemoryClass::kWeights);
  EXPECT_THROW(limited.allocate(10), OutOfMemory);
  EXPECT_EQ(upstream.asked, 1);
  EXPECT_EQ(ledger.in_use(), 0);
}

TEST(TrackedResource, CountsLiveBytesTheirPeakAndCalls) {
  HeapResource heap;
  TrackedResource tracked(heap);
  void* const first = tracked.allocate(100);
  void* const second = tracked.allocate(50);
  tracked.release(first, 100);
  void* const third = tracked.allocate(20);
  const ResourceStatistics statistics = tracked.statistics();
  EXPECT_EQ(statistics.live_bytes, 70);
  EXPECT_EQ(statistics.peak_bytes, 150);
  EXPECT_EQ(statistics.allocations, 3);
  EXPECT_EQ(statistics.releases, 1);
  tracked.release(second, 50);
  tracked.release(third, 20);
  EXPECT_EQ(tracked.statistics().live_bytes, 0);
}

TEST(TrackedResource, CountsNothingWhenUpstreamFails) {
  Exhausted upstream;
  TrackedResource tracked(upstream);
  EXPECT_THROW(tracked.allocate(10), OutOfMemory);
  EXPECT_EQ(tracked.statistics().allocations, 0);
  EXPECT_EQ(tracked.statistics().peak_bytes, 0);
}

}  // namespace
}  // namespace hydra
