// The link model, the slots and the hazards of the simulated device.
#include "csrc/transfer/simulated_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "csrc/base/errors.h"
#include "csrc/transfer/worker_lane.h"
#include "tests/cpp/support.h"

namespace hydra {
namespace {

using test::copy_job;
using test::Gate;
using test::random_bytes;
using Buffer = std::vector<std::uint8_t>;

/// Blocks the compute lane until opened.
class HeldCompute final : public FaultInjector {
 public:
  void before_job(Direction /*direction*/) override {}
  void before_slot(Bytes /*bytes*/) override {}
  void before_kernel() noexcept override { gate.wait(); }
  Gate gate;
};

/// An asynchronous device whose kernels wait for the gate, which opens at the end of the test at the latest.
class HeldDevice {
 public:
  ~HeldDevice() { held_->gate.open(); }
  SimulatedDevice* operator->() { return &device_; }
  void let_compute_go() { held_->gate.open(); }

 private:
  std::shared_ptr<HeldCompute> held_ = std::make_shared<HeldCompute>();
  SimulatedDevice device_{{.asynchronous = true, .kernel_delay_seconds = 0.0, .faults = held_}};
};

Buffer poison(Bytes bytes) {
  return Buffer(static_cast<std::size_t>(bytes), static_cast<std::uint8_t>(SimulatedDevice::kPoison));
}

Buffer bytes_at(const void* pointer, Bytes bytes) {
  const auto* begin = static_cast<const std::uint8_t*>(pointer);
  return Buffer(begin, begin + bytes);
}

Job read_job(Buffer& destination, const void* source, FencePtr fence) {
  Job job;
  job.segments.push_back(
      {.destination = destination.data(), .source = source, .bytes = static_cast<Bytes>(destination.size())});
  job.fences.push_back(std::move(fence));
  return job;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(SimulatedLink, TakesAtLeastBytesOverBandwidth) {
  SimulatedDevice device({.to_device_bytes_per_second = 100e6, .to_host_bytes_per_second = 50e6});
  const Buffer source = random_bytes(kMiB, 1);
  Buffer target(source.size());
  for (const auto& [lane, bandwidth] : {std::pair{&device.to_device(), 100e6}, {&device.to_host(), 50e6}}) {
    const double least = static_cast<double>(kMiB) / bandwidth;
    const auto start = std::chrono::steady_clock::now();
    const TicketPtr ticket = lane->submit(copy_job(target.data(), source));
    ticket->wait();
    EXPECT_GE(seconds_since(start), least);
    EXPECT_GE(ticket->seconds(), least);
    EXPECT_GE(lane->statistics().busy_seconds, least);
  }
}

TEST(SimulatedLink, TakesAtLeastTheSumForABusyLane) {
  SimulatedDevice device({.to_device_bytes_per_second = 200e6});
  const Buffer source = random_bytes(100000, 1);
  Buffer target(source.size());
  const double each = 100000.0 / 200e6;
  const auto start = std::chrono::steady_clock::now();
  std::vector<TicketPtr> tickets;
  for (int i = 0; i < 20; ++i) {
    tickets.push_back(device.to_device().submit(copy_job(target.data(), source)));
  }
  device.to_device().drain();
  EXPECT_GE(seconds_since(start), 20 * each);
  for (const TicketPtr& ticket : tickets) {
    EXPECT_GE(ticket->seconds(), each);
  }
}

TEST(SimulatedLink, TakesAtLeastBytesOverBandwidthForJobsOneAfterAnother) {
  // A late wake-up must not be credited to a job that was submitted only later.
  SimulatedDevice device({.to_device_bytes_per_second = 500e6});
  const Buffer source = random_bytes(100000, 1);
  Buffer target(source.size());
  for (int i = 0; i < 50; ++i) {
    const auto start = std::chrono::steady_clock::now();
    device.to_device().submit(copy_job(target.data(), source))->wait();
    EXPECT_GE(seconds_since(start), 100000.0 / 500e6);
  }
}

TEST(SimulatedLink, CreditsNoTimeThatAHostFunctionTook) {
  SimulatedDevice device({.to_device_bytes_per_second = 100e6});
  const Buffer source = random_bytes(100000, 1);
  Buffer target(source.size());
  std::chrono::steady_clock::time_point prepared;
  Job job = copy_job(target.data(), source);
  job.before = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    prepared = std::chrono::steady_clock::now();
  };
  device.to_device().submit(std::move(job))->wait();
  EXPECT_GE(seconds_since(prepared), 100000.0 / 100e6);
}

TEST(SimulatedLink, AddsTheLatencyOncePerJobEvenWithoutBytes) {
  SimulatedDevice device({.to_device_bytes_per_second = 100e6, .latency_seconds = 0.004});
  const Buffer source = random_bytes(kMiB, 1);
  Buffer target(source.size());
  auto start = std::chrono::steady_clock::now();
  device.to_device().submit(copy_job(target.data(), source))->wait();
  EXPECT_GE(seconds_since(start), 0.004 + static_cast<double>(kMiB) / 100e6);
  start = std::chrono::steady_clock::now();
  device.to_device().submit({})->wait();
  device.to_device().submit({})->wait();
  EXPECT_GE(seconds_since(start), 0.008);
}

TEST(SimulatedSlots, AreHandedOutPoisonedInBothModes) {
  for (const bool asynchronous : {false, true}) {
    SimulatedDevice device({.asynchronous = asynchronous});
    void* const slot = device.slots().allocate(3000);
    EXPECT_EQ(bytes_at(slot, 3000), poison(3000));
    device.slots().release(slot, 3000);
  }
}

TEST(SimulatedSlots, AreReusedAtOnceForTheSameSizeInTheAsynchronousMode) {
  HeldDevice device;
  void* const slot = device->slots().allocate(1000);
  std::fill_n(static_cast<char*>(slot), 1000, 'x');
  device->note_read(slot, 1000);
  device->slots().release(slot, 1000);
  EXPECT_EQ(bytes_at(slot, 1000), poison(1000));
  void* const other = device->slots().allocate(2000);
  EXPECT_NE(other, slot);
  EXPECT_EQ(device->slots().allocate(1000), slot);
  device->slots().release(slot, 1000);
  device->slots().release(other, 2000);
  device.let_compute_go();
}

TEST(SimulatedSlots, KeepTheirBytesWithoutPoison) {
  SimulatedDevice device({.poison = false, .asynchronous = true});
  void* const slot = device.slots().allocate(10);
  std::fill_n(static_cast<char*>(slot), 10, 'x');
  device.slots().release(slot, 10);
  ASSERT_EQ(device.slots().allocate(10), slot);
  EXPECT_EQ(bytes_at(slot, 10), Buffer(10, 'x'));
  device.slots().release(slot, 10);
}

TEST(PlainMode, HasNullFencesAndNoHazards) {
  SimulatedDevice device;
  Buffer bytes = random_bytes(100, 1);
  const Buffer before = bytes;
  device.note_read(bytes.data(), 100);
  device.note_write(bytes.data(), 100);
  EXPECT_EQ(bytes, before);
  EXPECT_EQ(device.record(), nullptr);
  EXPECT_EQ(device.hazards(), 0);
  EXPECT_EQ(device.first_hazard(), "");
}

TEST(AsynchronousMode, FencesAreReachedOnlyBehindTheKernelsBeforeThem) {
  HeldDevice device;
  Buffer bytes = random_bytes(100, 1);
  const FencePtr nothing_before = device->record();
  device->note_read(bytes.data(), 100);
  const FencePtr behind = device->record();
  EXPECT_TRUE(nothing_before->reached());
  EXPECT_FALSE(behind->reached());
  device.let_compute_go();
  behind->wait();
  EXPECT_TRUE(behind->reached());
}

TEST(AsynchronousMode, AWaitForAFenceLetsAnotherRunGoOn) {
  HeldDevice device;
  Buffer bytes = random_bytes(100, 1);
  device->note_read(bytes.data(), 100);
  const FencePtr behind = device->record();
  test::expect_pause([&] { behind->wait(); }, [&] { device.let_compute_go(); });
}

TEST(AsynchronousMode, FencesMayOutliveTheDevice) {
  FencePtr fence;
  {
    SimulatedDevice device({.asynchronous = true});
    Buffer bytes = random_bytes(10, 1);
    device.note_read(bytes.data(), 10);
    fence = device.record();
  }
  EXPECT_TRUE(fence->reached());
  fence->wait();
}

TEST(AsynchronousMode, OverwritingASlotThatIsStillReadIsAHazard) {
  HeldDevice device;
  const Buffer source = random_bytes(1000, 1);
  void* slot = device->slots().allocate(1000);
  device->note_read(slot, 1000);
  device->slots().release(slot, 1000);
  slot = device->slots().allocate(1000);
  device->to_device().submit(copy_job(slot, source))->wait();
  device.let_compute_go();
  EXPECT_EQ(device->hazards(), 1);
  EXPECT_NE(device->first_hazard().find("overwrote 1000 bytes"), std::string::npos) << device->first_hazard();
  EXPECT_NE(device->first_hazard().find("read by kernel 1"), std::string::npos) << device->first_hazard();
  device->slots().release(slot, 1000);
}

TEST(AsynchronousMode, OverwritingWithoutHavingSeenTheFenceIsAHazardEvenWhenComputeWasQuick) {
  SimulatedDevice device({.asynchronous = true, .kernel_delay_seconds = 0.0});
  const Buffer source = random_bytes(1000, 1);
  void* const slot = device.slots().allocate(1000);
  for (int i = 0; i < 100; ++i) {
    device.note_read(slot, 1000);
    device.to_device().submit(copy_job(slot, source))->wait();
  }
  EXPECT_EQ(device.hazards(), 100);
  device.slots().release(slot, 1000);
}

TEST(AsynchronousMode, AFenceFromBeforeTheReadDoesNotHelp) {
  HeldDevice device;
  const Buffer source = random_bytes(100, 1);
  Buffer target(100);
  Job job = copy_job(target.data(), source);
  job.fences.push_back(device->record());
  device->note_read(target.data(), 100);
  device->to_device().submit(std::move(job))->wait();
  device.let_compute_go();
  EXPECT_EQ(device->hazards(), 1);
}

TEST(AsynchronousMode, OverwritingBehindTheFenceIsNoHazard) {
  SimulatedDevice device({.asynchronous = true, .seed = 3});
  const Buffer source = random_bytes(1000, 1);
  for (int i = 0; i < 50; ++i) {
    void* const slot = device.slots().allocate(1000);
    Job job = copy_job(slot, source);
    job.fences.push_back(device.record());
    device.compute_waits(*device.to_device().submit(std::move(job)));
    EXPECT_EQ(bytes_at(slot, 1000), source);
    device.note_read(slot, 1000);
    device.slots().release(slot, 1000);
  }
  EXPECT_EQ(device.hazards(), 0) << device.first_hazard();
}

TEST(AsynchronousMode, OverwritingOtherBytesIsNoHazard) {
  HeldDevice device;
  const Buffer source = random_bytes(100, 1);
  Buffer target(300);
  device->note_read(target.data(), 100);
  device->note_read(target.data() + 200, 100);
  device->to_device().submit(copy_job(target.data() + 100, source))->wait();
  device.let_compute_go();
  EXPECT_EQ(device->hazards(), 0) << device->first_hazard();
}

TEST(AsynchronousMode, AFenceSeenByTheHostOrAnotherLaneCountsForLaterJobs) {
  SimulatedDevice device({.asynchronous = true});
  const Buffer source = random_bytes(100, 1);
  Buffer target(100);
  Buffer copy(100);
  device.note_read(target.data(), 100);
  device.record()->wait();
  device.to_device().submit(copy_job(target.data(), source))->wait();
  device.note_read(target.data(), 100);
  device.to_host().submit(read_job(copy, target.data(), device.record()))->wait();
  device.to_device().submit(copy_job(target.data(), source))->wait();
  EXPECT_EQ(device.hazards(), 0) << device.first_hazard();
}

TEST(AsynchronousMode, CopyingToTheHostWhatIsOnlyReadIsNoHazard) {
  HeldDevice device;
  const Buffer source = random_bytes(100, 1);
  Buffer target(100);
  device->note_read(source.data(), 100);
  device->to_host().submit(copy_job(target.data(), source))->wait();
  EXPECT_EQ(target, source);
  device.let_compute_go();
  EXPECT_EQ(device->hazards(), 0);
}

TEST(AsynchronousMode, CopyingWhatIsStillWrittenCopiesPoisonAndIsAHazard) {
  HeldDevice device;
  Buffer gradient = random_bytes(1000, 1);
  Buffer target(1000);
  device->note_write(gradient.data(), 1000);
  device->to_host().submit(read_job(target, gradient.data(), nullptr))->wait();
  EXPECT_EQ(target, poison(1000));
  device.let_compute_go();
  EXPECT_EQ(device->hazards(), 1);
  EXPECT_NE(device->first_hazard().find("written by kernel 1"), std::string::npos) << device->first_hazard();
}

TEST(AsynchronousMode, CopyingWhatWasWrittenBehindTheFenceGetsTheBytes) {
  SimulatedDevice device({.asynchronous = true, .seed = 5});
  for (std::uint32_t i = 0; i < 30; ++i) {
    Buffer gradient = random_bytes(1000, i);
    const Buffer expected = gradient;
    Buffer target(1000);
    device.note_write(gradient.data(), 1000);
    device.to_host().submit(read_job(target, gradient.data(), device.record()))->wait();
    EXPECT_EQ(target, expected);
    EXPECT_EQ(gradient, expected);
  }
  EXPECT_EQ(device.hazards(), 0) << device.first_hazard();
}

TEST(AsynchronousMode, OverwritingWhatIsStillWrittenIsAHazard) {
  HeldDevice device;
  Buffer target = random_bytes(100, 1);
  const Buffer source = random_bytes(100, 2);
  device->note_write(target.data(), 100);
  device->to_device().submit(copy_job(target.data(), source))->wait();
  device.let_compute_go();
  EXPECT_EQ(device->hazards(), 1);
}

TEST(AsynchronousMode, DrawsTheSameDelaysFromTheSameSeedAndStillEndsInOrder) {
  SimulatedDevice device({.asynchronous = true, .seed = 11});
  Buffer first = random_bytes(10, 1);
  Buffer second = random_bytes(10, 2);
  device.note_read(first.data(), 10);
  const FencePtr early = device.record();
  device.note_read(second.data(), 10);
  device.record()->wait();
  EXPECT_TRUE(early->reached());
}

TEST(AsynchronousMode, DestructionDrainsLanesThatWaitForCompute) {
  Buffer gradient = random_bytes(1000, 1);
  const Buffer expected = gradient;
  Buffer target(1000);
  TicketPtr ticket;
  {
    SimulatedDevice device({.asynchronous = true, .kernel_delay_seconds = 0.005});
    device.note_write(gradient.data(), 1000);
    ticket = device.to_host().submit(read_job(target, gradient.data(), device.record()));
  }
  EXPECT_TRUE(ticket->finished());
  EXPECT_EQ(target, expected);
}

}  // namespace
}  // namespace hydra
