// The contract suite of device backends, over both modes of the simulated device, and over a run's view of it.
#include "csrc/transfer/device_backend.h"

#include <future>
#include <stdexcept>
#include <thread>

#include "csrc/base/errors.h"
#include "csrc/transfer/shared_backend.h"
#include "csrc/transfer/simulated_device.h"
#include "csrc/transfer/worker_lane.h"
#include "tests/cpp/transfer/device_contract.h"

namespace hydra::test {

TEST_P(DeviceContract, HasAName) { EXPECT_FALSE(device().name().empty()); }

TEST_P(DeviceContract, BringsBytesToTheDeviceAndBack) {
  for (const Bytes bytes : {Bytes{1}, Bytes{513}, Bytes{70000}}) {
    const std::vector<std::uint8_t> source = random_bytes(bytes, 1);
    const Slot slot(device(), bytes);
    const TicketPtr ticket = device().to_device().submit(upload(slot, source));
    device().compute_waits(*ticket);
    EXPECT_EQ(download(slot.get(), bytes), source);
    EXPECT_EQ(ticket->bytes(), bytes);
  }
}

TEST_P(DeviceContract, BringsJobsOfManyPiecesOver) {
  const Bytes bytes = 2 * WorkerLane::kPieceBytes + 4097;
  const std::vector<std::uint8_t> source = random_bytes(bytes, 2);
  const Slot slot(device(), bytes);
  const TicketPtr ticket = device().to_device().submit(upload(slot, source));
  device().compute_waits(*ticket);
  EXPECT_EQ(download(slot.get(), bytes), source);
}

TEST_P(DeviceContract, ScattersTheSegmentsOfAJob) {
  const std::vector<std::uint8_t> first = random_bytes(1000, 3);
  const std::vector<std::uint8_t> second = random_bytes(300, 4);
  const Slot slot(device(), 4096);
  Job job = upload(slot, first);
  job.segments.push_back({.destination = slot.get() + 2048, .source = second.data(), .bytes = 300});
  const TicketPtr ticket = device().to_device().submit(std::move(job));
  device().compute_waits(*ticket);
  EXPECT_EQ(download(slot.get(), 1000), first);
  EXPECT_EQ(download(slot.get() + 2048, 300), second);
  EXPECT_EQ(ticket->bytes(), 1300);
}

TEST_P(DeviceContract, AlignsSlots) {
  for (const Bytes bytes : {Bytes{1}, Bytes{700}, kMiB}) {
    const Slot slot(device(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(slot.get()) % kPageAlignment, 0U);
  }
}

TEST_P(DeviceContract, AcceptsNullFencesAndJobsWithoutBytes) {
  Job job;
  job.fences = {nullptr, nullptr};
  EXPECT_NO_THROW(device().to_device().submit(job)->wait());
  EXPECT_NO_THROW(device().to_host().submit(job)->wait());
}

TEST_P(DeviceContract, FencesAreReachedWithoutFurtherWork) {
  const Slot slot(device(), 64);
  device().note_read(slot.get(), 64);
  if (const FencePtr fence = device().record()) {
    fence->wait();
    EXPECT_TRUE(fence->reached());
  }
}

TEST_P(DeviceContract, BytesThatComputeWroteAreCopiedBehindItsFence) {
  const std::vector<std::uint8_t> source = random_bytes(5000, 5);
  const Slot slot(device(), 5000);
  const TicketPtr ticket = device().to_device().submit(upload(slot, source));
  device().compute_waits(*ticket);
  for (int i = 0; i < 20; ++i) {
    device().note_write(slot.get(), 5000);
    EXPECT_EQ(download(slot.get(), 5000), source);
  }
}

TEST_P(DeviceContract, SlotsReleasedAndTakenAgainServeManyRounds) {
  for (std::uint32_t round = 0; round < 50; ++round) {
    const std::vector<std::uint8_t> source = random_bytes(2048, round);
    const Slot slot(device(), 2048);
    const TicketPtr ticket = device().to_device().submit(upload(slot, source));
    device().compute_waits(*ticket);
    device().note_read(slot.get(), 2048);
    EXPECT_EQ(download(slot.get(), 2048), source);
  }
}

TEST_P(DeviceContract, ComputeWaitsThrowsTheErrorOfTheTicketAndTheLaneGoesOn) {
  for (Lane* lane : {&device().to_device(), &device().to_host()}) {
    Job job;
    job.before = [] { throw std::runtime_error("broken on purpose"); };
    const TicketPtr failed = lane->submit(std::move(job));
    EXPECT_THROW(device().compute_waits(*failed), std::runtime_error);
    EXPECT_NO_THROW(lane->submit({})->wait());
    EXPECT_EQ(lane->statistics().failures, 1);
    EXPECT_EQ(lane->statistics().jobs, 2);
  }
}

TEST_P(DeviceContract, AfterSeesTheBytesOnTheHost) {
  const std::vector<std::uint8_t> source = random_bytes(300, 6);
  const Slot slot(device(), 300);
  device().compute_waits(*device().to_device().submit(upload(slot, source)));
  std::vector<std::uint8_t> staging(300);
  std::vector<std::uint8_t> summed(300);
  Job job;
  job.segments.push_back({.destination = staging.data(), .source = slot.get(), .bytes = 300});
  job.fences.push_back(device().record());
  job.after = [&] { summed = staging; };
  device().to_host().submit(std::move(job))->wait();
  EXPECT_EQ(summed, source);
}

TEST_P(DeviceContract, BeforePreparesTheBytesThatAreMoved) {
  std::vector<std::uint8_t> staging(300, 0);
  const std::vector<std::uint8_t> source = random_bytes(300, 7);
  const Slot slot(device(), 300);
  Job job = upload(slot, staging);
  job.before = [&] { staging = source; };
  device().compute_waits(*device().to_device().submit(std::move(job)));
  EXPECT_EQ(download(slot.get(), 300), source);
}

/// A thread that has waited for a ticket may end what the owners need.
TEST_P(DeviceContract, DropsTheOwnersOfAJobBeforeItsTicketEnds) {
  for (Lane* lane : {&device().to_device(), &device().to_host()}) {
    Gate submitted;
    TicketPtr ticket;
    std::promise<bool> was_finished;
    Job job;
    job.before = [&submitted] { submitted.wait(); };
    job.after = [owner = std::shared_ptr<void>(nullptr, [&](void*) { was_finished.set_value(ticket->finished()); })] {};
    ticket = lane->submit(std::move(job));
    submitted.open();
    EXPECT_FALSE(was_finished.get_future().get());
    ticket->wait();
  }
}

TEST_P(DeviceContract, CountsBytesPerDirection) {
  const std::vector<std::uint8_t> source = random_bytes(1000, 8);
  const Slot slot(device(), 1000);
  device().compute_waits(*device().to_device().submit(upload(slot, source)));
  download(slot.get(), 700);
  device().to_device().drain();  // compute may wait where the host does not
  EXPECT_EQ(device().to_device().statistics().bytes, 1000);
  EXPECT_EQ(device().to_host().statistics().bytes, 700);
  EXPECT_GT(device().to_device().statistics().busy_seconds, 0.0);
}

TEST_P(DeviceContract, DrainLeavesNothingUnfinished) {
  const std::vector<std::uint8_t> source = random_bytes(4096, 9);
  const Slot slot(device(), 4096);
  std::vector<TicketPtr> tickets;
  for (int i = 0; i < 30; ++i) {
    Job job = upload(slot, source);
    job.priority = static_cast<Priority>(i % 3);
    tickets.push_back(device().to_device().submit(std::move(job)));
  }
  device().to_device().drain();
  for (const TicketPtr& ticket : tickets) {
    EXPECT_TRUE(ticket->finished());
  }
}

TEST_P(DeviceContract, ServesTwoThreadsThatLoadAndStoreAtOnce) {
  const auto work = [this](std::uint32_t seed) {
    for (std::uint32_t i = 0; i < 30; ++i) {
      const std::vector<std::uint8_t> source = random_bytes(3000, seed + i);
      const Slot slot(device(), 3000);
      device().compute_waits(*device().to_device().submit(upload(slot, source)));
      device().note_read(slot.get(), 3000);
      EXPECT_EQ(download(slot.get(), 3000), source);
    }
  };
  std::jthread other(work, 1000U);
  work(2000U);
}

namespace {

BackendCase simulated(std::string name, SimulatedDeviceOptions options) {
  return {.name = std::move(name), .make = [options] { return std::make_unique<SimulatedDevice>(options); }};
}

BackendCase shared(std::string name, SimulatedDeviceOptions options) {
  return {.name = std::move(name),
          .make = [options] { return std::make_unique<SharedBackend>(std::make_shared<SimulatedDevice>(options)); }};
}

std::string case_name(const ::testing::TestParamInfo<BackendCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Simulated, DeviceContract,
                         ::testing::Values(simulated("plain", {}),
                                           simulated("slow_link", {.to_device_bytes_per_second = 2e9,
                                                                   .to_host_bytes_per_second = 1e9,
                                                                   .latency_seconds = 1e-5}),
                                           simulated("asynchronous", {.asynchronous = true, .seed = 7}),
                                           shared("shared_plain", {}),
                                           shared("shared_asynchronous", {.asynchronous = true, .seed = 8})),
                         case_name);

}  // namespace
}  // namespace hydra::test
