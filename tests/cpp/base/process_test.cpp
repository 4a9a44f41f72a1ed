// Forked children: calls that need the parent's threads throw, and no call waits for them.
#include "csrc/base/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <functional>
#include <memory>
#include <string>

#include "csrc/memory/limited_resource.h"
#include "csrc/optim/norm_accumulator.h"
#include "csrc/paging/pager.h"
#include "csrc/transfer/simulated_device.h"
#include "tests/cpp/paging/pager_support.h"

namespace hydra::test {
namespace {

constexpr Bytes kBlock = 1024;

/// The exit status of a child: 0 if `body` returns true there. A signal ends a child that hangs.
int status_of_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::_exit(body() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

bool refuses(const std::function<void()>& call) {
  try {
    call();
  } catch (const StateError& error) {
    return std::string(error.what()).find("cannot be used in a forked child") != std::string::npos;
  }
  return false;
}

/// A pager of two blocks and one slot, over a device.
struct Rig {
  explicit Rig(bool asynchronous) {
    SimulatedDeviceOptions options;
    options.asynchronous = asynchronous;
    device = std::make_unique<SimulatedDevice>(options);
    slots = std::make_unique<LimitedResource>(device->slots(), ledger, MemoryClass::kWeights);
    pager = std::make_unique<Pager>(*device, *slots, ledger);
    pager->add_block("first", kBlock, std::make_unique<FakeBlock>(random_bytes(kBlock, 1)));
    pager->add_block("second", kBlock, std::make_unique<FakeBlock>(random_bytes(kBlock, 1)));
  }

  Ledger ledger{kBlock};
  std::unique_ptr<SimulatedDevice> device;
  std::unique_ptr<LimitedResource> slots;
  std::unique_ptr<Pager> pager;
};

class ForkTest : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Modes, ForkTest, ::testing::Bool(),
                         [](const auto& mode) { return mode.param ? "Asynchronous" : "Plain"; });

TEST(ForksTest, AreCountedInTheChildAlone) {
  const std::int64_t here = forks();
  const HomeProcess home;
  EXPECT_EQ(status_of_child([&] {
              const bool grandchild = status_of_child([&] { return forks() == here + 2 && !home.here(); }) == 0;
              return grandchild && forks() == here + 1 && !home.here() && HomeProcess().here();
            }),
            0);
  EXPECT_EQ(forks(), here);
  EXPECT_TRUE(home.here());
}

TEST_P(ForkTest, LanesTakeNoJobsInAChild) {
  Rig rig(GetParam());
  std::vector<std::uint8_t> to(kBlock);
  const std::vector<std::uint8_t> from = random_bytes(kBlock, 2);
  const int status = status_of_child([&] {
    rig.device->to_host().drain();
    return refuses([&] { rig.device->to_host().submit(copy_job(to.data(), from)); });
  });
  EXPECT_EQ(status, 0);
  rig.device->to_host().submit(copy_job(to.data(), from))->wait();
  EXPECT_EQ(to, from);
}

TEST_P(ForkTest, NothingWaitsForACopyThatRunsInTheParent) {
  Rig rig(GetParam());
  std::vector<std::uint8_t> to(kBlock);
  const std::vector<std::uint8_t> from = random_bytes(kBlock, 2);
  const auto opened = std::make_shared<ManualFence>();
  Job job = copy_job(to.data(), from);
  job.fences = {opened};
  const TicketPtr ticket = rig.device->to_host().submit(std::move(job));
  const int status = status_of_child([&] {
    rig.device->to_host().drain();
    ticket->wait_quietly();
    ticket->wait_enqueued();
    return refuses([&] { ticket->wait(); });
  });
  EXPECT_EQ(status, 0);
  opened->reach();
  ticket->wait();
}

TEST_P(ForkTest, ThePagerRefusesEveryUseInAChildAndEndsQuietly) {
  Rig rig(GetParam());
  rig.pager->passes().begin(PassKind::kForward);
  rig.pager->passes().arrive(0);
  const int status = status_of_child([&] {
    bool refused = refuses([&] { rig.pager->passes().begin(PassKind::kForward); });
    for (const std::int32_t block : {0, 1}) {  // present and absent
      refused = refused && refuses([&] { rig.pager->passes().arrive(block); });
      refused = refused && refuses([&] { rig.pager->acquire(block, AcquireReason::kFault); });
      refused = refused && refuses([&] { rig.pager->contents().invalidate(block); });
    }
    refused = refused && refuses([&] { rig.pager->contents().write_back_dirty(); });
    refused = refused && !rig.pager->evict_one();
    rig.pager->release(0, AcquireReason::kHook);
    rig.pager->passes().end(true);
    rig.pager->close();
    rig.pager.reset();
    rig.device.reset();
    return refused;
  });
  EXPECT_EQ(status, 0);
  rig.pager->release(0, AcquireReason::kHook);
  rig.pager->passes().arrive(1);
  rig.pager->release(1, AcquireReason::kHook);
  rig.pager->passes().end(true);
}

TEST(NormAccumulatorTest, IsRefusedInAChildAndEndsQuietly) {
  const std::vector<float> numbers(8, 1.0F);
  const NormInput gradient{numbers.data(), NumberFormat::kFloat32, 8};
  auto accumulator = std::make_unique<NormAccumulator>([](auto, auto sums) { sums[0] = 8.0; });
  const int status = status_of_child([&] {
    const bool refused = refuses([&] { accumulator->expect(&numbers); }) && refuses([&] { accumulator->release(); }) &&
                         refuses([&] { accumulator->forget(); }) && refuses([&] { accumulator->take(); });
    accumulator.reset();
    return refused;
  });
  EXPECT_EQ(status, 0);
  accumulator->arrived(&numbers, accumulator->expect(&numbers), gradient, nullptr);
  EXPECT_EQ(accumulator->take().at(&numbers).value, 8.0);
}

}  // namespace
}  // namespace hydra::test
