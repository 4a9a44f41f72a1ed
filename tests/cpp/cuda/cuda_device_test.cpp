// The CUDA device on the emulated runtime: waits, errors, threads and devices. A GPU would show their faults only by
// luck.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "csrc/base/errors.h"
#include "csrc/transfer/cuda/cuda_numa_node.h"
#include "csrc/transfer/cuda/cuda_pinner.h"
#include "emulator/cudart/control.h"
#include "tests/cpp/cuda/cuda_support.h"
#include "tests/cpp/memory/numa_support.h"
#include "tests/cpp/support.h"

namespace hydra::test {
namespace {

constexpr Bytes kBytes = 4096;

class CudaDeviceTest : public ::testing::Test {
 protected:
  CudaDeviceTest() {
    emulated_cuda::reset();
    HYDRA_CUDA(cudaStreamCreateWithFlags(&home_, cudaStreamNonBlocking));
    HYDRA_CUDA(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking));
    compute_stream = home_;
    device_ = make_cuda_device(0, home_);
  }
  ~CudaDeviceTest() override {
    emulated_cuda::reset();
    device_.reset();
    forget_cuda_error(cudaStreamDestroy(home_));
    forget_cuda_error(cudaStreamDestroy(side_));
    compute_stream = nullptr;
  }

  TicketPtr fill(void* slot, const std::vector<std::uint8_t>& bytes, std::vector<FencePtr> fences) {
    Job job = copy_job(slot, bytes);
    job.fences = std::move(fences);
    return device_->to_device().submit(std::move(job));
  }

  /// A kernel that reads the slot late.
  std::shared_ptr<std::vector<std::uint8_t>> read_late(cudaStream_t stream, const void* slot) {
    auto seen = std::make_shared<std::vector<std::uint8_t>>();
    emulated_cuda::launch(stream, [seen, slot] {
      const auto* bytes = static_cast<const std::uint8_t*>(slot);
      seen->assign(bytes, bytes + kBytes);
    });
    return seen;
  }

  void finish(cudaStream_t stream) { HYDRA_CUDA(cudaStreamSynchronize(stream)); }

  cudaStream_t home_ = nullptr;
  cudaStream_t side_ = nullptr;
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(CudaDeviceTest, ComputeWaitsOnTheDeviceForACopyThatIsStillUnderWay) {
  const std::vector<std::uint8_t> source = random_bytes(kBytes, 1);
  void* const slot = device_->slots().allocate(kBytes);
  Gate gate;
  emulated_cuda::launch(device_->to_device_stream(), [&gate] { gate.wait(); });
  const TicketPtr ticket = fill(slot, source, {});
  device_->compute_waits(*ticket);
  EXPECT_FALSE(ticket->finished()) << "the host must not have waited";
  const auto seen = read_late(home_, slot);
  gate.open();
  finish(home_);
  EXPECT_EQ(*seen, source);
  ticket->wait();
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, ACopyOverASlotWaitsForComputeThatReadsItOnAnyMarkedStream) {
  const std::vector<std::uint8_t> first = random_bytes(kBytes, 2);
  const std::vector<std::uint8_t> second = random_bytes(kBytes, 3);
  for (cudaStream_t stream : {home_, side_}) {
    compute_stream = stream;
    void* const slot = device_->slots().allocate(kBytes);
    device_->compute_waits(*fill(slot, first, {device_->record()}));
    Gate gate;
    emulated_cuda::launch(stream, [&gate] { gate.wait(); });
    const auto seen = read_late(stream, slot);
    const TicketPtr overwritten = fill(slot, second, {device_->record()});
    overwritten->wait_enqueued();
    EXPECT_FALSE(overwritten->finished());
    gate.open();
    overwritten->wait();
    EXPECT_EQ(*seen, first);
    device_->slots().release(slot, kBytes);
  }
}

TEST_F(CudaDeviceTest, ASlotReturnsBehindTheUsesOnSideStreams) {
  void* const slot = device_->slots().allocate(kBytes);
  compute_stream = side_;
  Gate gate;
  emulated_cuda::launch(side_, [&gate] { gate.wait(); });
  const FencePtr use = device_->record_use();
  ASSERT_NE(use, nullptr);
  compute_stream = home_;
  EXPECT_EQ(device_->record_use(), nullptr);
  const std::int64_t waits = emulated_cuda::calls("cudaStreamWaitEvent");
  device_->slot_returns(nullptr, {use});
  EXPECT_EQ(emulated_cuda::calls("cudaStreamWaitEvent"), waits + 1);
  std::atomic<bool> reused{false};
  emulated_cuda::launch(home_, [&reused] { reused = true; });
  EXPECT_FALSE(use->reached());
  EXPECT_FALSE(reused.load());
  gate.open();
  finish(home_);
  EXPECT_TRUE(use->reached());
  EXPECT_TRUE(reused.load());
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, ASlotReturnsBehindAllComputeIfOneOfItsFencesCouldNotBeRecorded) {
  void* const slot = device_->slots().allocate(kBytes);
  compute_stream = side_;
  std::atomic<bool> used{false};
  Gate gate;
  emulated_cuda::launch(side_, [&] {
    gate.wait();
    used = true;
  });
  emulated_cuda::fail("cudaEventRecord", cudaErrorUnknown);
  const FencePtr lost = device_->record_use();
  const FencePtr use = device_->record_use();
  compute_stream = home_;
  const std::int64_t waits = emulated_cuda::calls("cudaDeviceSynchronize");
  std::thread opener([&gate] { gate.open(); });
  device_->slot_returns(nullptr, {lost, use});
  EXPECT_TRUE(used.load());
  EXPECT_EQ(emulated_cuda::calls("cudaDeviceSynchronize"), waits + 1);
  opener.join();
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, ASlotReturnsBehindTheCopyThatStillFillsIt) {
  const std::vector<std::uint8_t> source = random_bytes(kBytes, 1);
  void* const slot = device_->slots().allocate(kBytes);
  compute_stream = side_;
  Gate gate;
  emulated_cuda::launch(device_->to_device_stream(), [&gate] { gate.wait(); });
  const TicketPtr ticket = fill(slot, source, {});
  ticket->wait_enqueued();
  const std::int64_t waits = emulated_cuda::calls("cudaStreamWaitEvent");
  device_->slot_returns(ticket.get(), {});
  EXPECT_FALSE(ticket->finished()) << "the host must not have waited";
  EXPECT_EQ(emulated_cuda::calls("cudaStreamWaitEvent"), waits + 1);
  const auto seen = read_late(home_, slot);
  gate.open();
  finish(home_);
  EXPECT_EQ(*seen, source);
  ticket->wait();
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, ComputeOfTheCurrentStreamFollowsAFence) {
  for (cudaStream_t follower : {home_, side_}) {
    cudaStream_t const leader = follower == home_ ? side_ : home_;
    compute_stream = leader;
    Gate gate;
    std::atomic<bool> written{false};
    emulated_cuda::launch(leader, [&gate, &written] {
      gate.wait();
      written = true;
    });
    const FencePtr fence = device_->record();
    compute_stream = follower;
    const std::int64_t waits = emulated_cuda::calls("cudaStreamWaitEvent");
    device_->compute_follows(fence);
    EXPECT_EQ(emulated_cuda::calls("cudaStreamWaitEvent"), waits + 1);
    bool seen = false;
    emulated_cuda::launch(follower, [&written, &seen] { seen = written.load(); });
    gate.open();
    finish(follower);
    EXPECT_TRUE(seen);
  }
}

TEST_F(CudaDeviceTest, AFenceIsReachedOnceAllItsStreamsHaveReachedIt) {
  for (cudaStream_t late : {home_, side_}) {
    compute_stream = side_;
    Gate gate;
    emulated_cuda::launch(late, [&gate] { gate.wait(); });
    const FencePtr fence = device_->record();
    finish(late == home_ ? side_ : home_);
    EXPECT_FALSE(fence->reached());
    gate.open();
    finish(late);
    EXPECT_TRUE(fence->reached());
  }
}

TEST_F(CudaDeviceTest, AnErrorInTheMiddleOfAJobFailsItsTicketOnlyWhenNothingOfItIsInFlight) {
  std::vector<std::uint8_t> source(static_cast<std::size_t>(3 * CudaLane::kBatchBytes), 4);
  void* const place = source.data();
  const auto bytes = static_cast<Bytes>(source.size());
  CudaPinner pinner(0);
  ASSERT_TRUE(pinner.pin(place, bytes));
  void* const slot = device_->slots().allocate(bytes);
  Gate gate;
  emulated_cuda::launch(device_->to_device_stream(), [&gate] { gate.wait(); });
  emulated_cuda::fail("cudaMemcpyAsync", cudaErrorUnknown, 2);
  const TicketPtr ticket = fill(slot, source, {});
  const std::vector<std::uint8_t> little = random_bytes(10, 5);
  const TicketPtr next = fill(slot, little, {});
  next->wait_enqueued();
  EXPECT_FALSE(ticket->finished());
  gate.open();
  EXPECT_NE(message_of(*ticket).find("cudaMemcpyAsync"), std::string::npos);
  pinner.unpin(place, bytes);  // the device would fail if it still read them
  EXPECT_NO_THROW(next->wait());
  EXPECT_EQ(device_->to_device().statistics().failures, 1);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  device_->slots().release(slot, bytes);
}

TEST_F(CudaDeviceTest, AJobThatFailsBetweenItsPiecesEndsOnceTheFirstHasBeenCopied) {
  std::vector<std::uint8_t> source = random_bytes(kBytes, 5);
  CudaPinner pinner(0);
  ASSERT_TRUE(pinner.pin(source.data(), kBytes));
  auto* const slot = static_cast<std::uint8_t*>(device_->slots().allocate(kBytes));
  Gate gate;
  emulated_cuda::launch(device_->to_device_stream(), [&gate] { gate.wait(); });
  Job job;
  job.segments = {{slot, source.data(), kBytes / 2}, {slot + kBytes / 2, source.data() + kBytes / 2, kBytes / 2}};
  emulated_cuda::fail("cudaMemcpyAsync", cudaErrorUnknown, 1);
  const TicketPtr ticket = device_->to_device().submit(std::move(job));
  while (!ticket->finished() && emulated_cuda::calls("cudaStreamSynchronize") == 0) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(ticket->finished()) << "a piece is still being copied";
  gate.open();
  EXPECT_NE(message_of(*ticket).find("cudaMemcpyAsync"), std::string::npos);
  finish(device_->to_device_stream());
  pinner.unpin(source.data(), kBytes);
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, NothingFollowsACopyThatHasFailed) {
  void* const slot = device_->slots().allocate(kBytes);
  const std::vector<std::uint8_t> source = random_bytes(kBytes, 7);
  for (const char* const call : {"cudaMemcpyAsync", "cudaEventSynchronize"}) {
    emulated_cuda::fail(call, cudaErrorUnknown);
    bool followed = false;
    Job job = copy_job(slot, source);
    job.after = [&followed] { followed = true; };
    EXPECT_THROW(device_->to_device().submit(std::move(job))->wait(), TransferError);
    EXPECT_FALSE(followed) << call;
  }
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, ErrorsSayWhatWasAskedAndWhatThereIs) {
  emulated_cuda::fail("cudaMalloc", cudaErrorMemoryAllocation);
  try {
    device_->slots().allocate(3 * kMiB);
    FAIL() << "nothing was thrown";
  } catch (const OutOfMemory& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("asked for 3.00 MiB (3145728 bytes)"), std::string::npos) << message;
    EXPECT_NE(message.find("free of 8.00 GiB"), std::string::npos) << message;
  }
}

TEST_F(CudaDeviceTest, AFenceThatCannotBeRecordedFailsTheCopyThatWaitsForIt) {
  emulated_cuda::fail("cudaEventRecord", cudaErrorUnknown);
  const FencePtr fence = device_->record();
  ASSERT_NE(fence, nullptr);
  void* const slot = device_->slots().allocate(kBytes);
  EXPECT_THROW(fill(slot, random_bytes(kBytes, 6), {fence})->wait(), TransferError);
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, AnErrorThatSurfacesAtTheEndOfACopyTravelsInItsTicket) {
  void* const slot = device_->slots().allocate(kBytes);
  for (const cudaError_t error : {cudaErrorUnknown, cudaErrorLaunchFailure, cudaErrorIllegalAddress}) {
    emulated_cuda::fail("cudaEventSynchronize", error);
    EXPECT_THROW(fill(slot, random_bytes(kBytes, 7), {})->wait(), TransferError);
    EXPECT_NO_THROW(fill(slot, random_bytes(kBytes, 7), {})->wait());
  }
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, UseInsideACaptureIsRefused) {
  EXPECT_NO_THROW(device_->expect_usable());
  emulated_cuda::set_capturing(home_, true);
  EXPECT_THROW(device_->expect_usable(), StateError);
}

TEST_F(CudaDeviceTest, ACaptureElsewhereDisturbsNoCopyAndIsNotDisturbed) {
  const std::vector<std::uint8_t> bytes = random_bytes(kBytes, 4);
  void* const slot = device_->slots().allocate(kBytes);
  emulated_cuda::set_capturing(side_, true);
  Gate gate;
  emulated_cuda::launch(home_, [&gate] { gate.wait(); });
  const FencePtr compute = device_->record();
  EXPECT_FALSE(compute->reached()) << "the query was refused";
  const TicketPtr copied = fill(slot, bytes, {compute});
  gate.open();
  EXPECT_NO_THROW(copied->wait());
  compute->wait();
  EXPECT_TRUE(compute->reached());
  emulated_cuda::set_capturing(side_, false);
  const auto seen = read_late(home_, slot);
  ASSERT_EQ(cudaStreamSynchronize(home_), cudaSuccess);
  EXPECT_EQ(*seen, bytes);
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, AFailedJobIsWaitedForWhileACaptureIsElsewhere) {
  const std::vector<std::uint8_t> bytes = random_bytes(kBytes, 5);
  void* const slot = device_->slots().allocate(kBytes);
  emulated_cuda::set_capturing(side_, true);
  emulated_cuda::fail("cudaEventRecord", cudaErrorUnknown, 1);  // behind the copy
  const TicketPtr ticket = fill(slot, bytes, {});
  EXPECT_NE(message_of(*ticket).find("cudaEventRecord"), std::string::npos) << "the wait for the copy was refused";
  emulated_cuda::set_capturing(side_, false);
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, AMoreUrgentJobGoesBetweenTheBatchesOfALongOne) {
  const std::vector<std::uint8_t> source(static_cast<std::size_t>(12 * CudaLane::kBatchBytes), 8);
  void* const slot = device_->slots().allocate(static_cast<Bytes>(source.size()));
  Gate gate;
  emulated_cuda::launch(device_->to_device_stream(), [&gate] { gate.wait(); });
  std::vector<int> order;
  Job slow = copy_job(slot, source);
  slow.after = [&order] { order.push_back(2); };
  const TicketPtr last = device_->to_device().submit(std::move(slow));
  Job urgent;
  urgent.priority = Priority::kFault;
  urgent.after = [&order] { order.push_back(1); };
  device_->to_device().submit(std::move(urgent));
  gate.open();
  last->wait();
  device_->to_device().drain();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  device_->slots().release(slot, static_cast<Bytes>(source.size()));
}

TEST_F(CudaDeviceTest, AMoreUrgentJobWaitsForTheBatchesThatAreInFlightAndNoMore) {
  const std::vector<std::uint8_t> source = random_bytes(kBytes, 8);
  void* const slot = device_->slots().allocate(kBytes);
  Lane& lane = device_->to_device();
  const auto place = static_cast<int>(CudaLane::kInFlight);  // of the urgent job
  for (int round = 0; round < 20; ++round) {  // an enqueuer that does not stop in time may still be late in one of them
    Gate gate;
    emulated_cuda::launch(device_->to_device_stream(), [&gate] { gate.wait(); });
    std::vector<int> order;
    std::vector<TicketPtr> slow;
    for (int number = 0; number < place + 2; ++number) {
      Job job = copy_job(slot, source);
      job.after = [&order, number, place] { order.push_back(number < place ? number : number + 1); };
      slow.push_back(lane.submit(std::move(job)));
    }
    slow[CudaLane::kInFlight - 1]->wait_enqueued();
    Job urgent;
    urgent.priority = Priority::kFault;
    urgent.after = [&order, place] { order.push_back(place); };
    lane.submit(std::move(urgent));
    gate.open();
    lane.drain();
    EXPECT_TRUE(std::ranges::is_sorted(order)) << "round " << round;
  }
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, TheHostGoesOnWhileTheLastBatchesAreUnderWay) {
  const std::vector<std::uint8_t> source(CudaLane::kInFlight * static_cast<std::size_t>(CudaLane::kBatchBytes), 8);
  void* const slot = device_->slots().allocate(static_cast<Bytes>(source.size()));
  Gate gate;
  emulated_cuda::launch(device_->to_device_stream(), [&gate] { gate.wait(); });
  const TicketPtr ticket = fill(slot, source, {});
  device_->compute_waits(*ticket);
  EXPECT_FALSE(ticket->finished());
  gate.open();
  ticket->wait();
  device_->slots().release(slot, static_cast<Bytes>(source.size()));
}

/// As its weights are being updated, or read from the disk.
TEST_F(CudaDeviceTest, APrefetchWhoseBytesAreNotReadyHoldsUpNoUrgentJob) {
  const std::vector<std::uint8_t> source = random_bytes(kBytes, 1);
  void* const slot = device_->slots().allocate(kBytes);
  void* const wanted = device_->slots().allocate(kBytes);
  Gate gate;
  bool overtaken = false;
  Job prefetch = copy_job(slot, source);
  prefetch.before = [&] { overtaken = gate.opens(); };
  const TicketPtr later = device_->to_device().submit(std::move(prefetch));
  Job urgent = copy_job(wanted, source);
  urgent.priority = Priority::kFault;
  urgent.before = [] {};  // has to be made ready too
  urgent.after = [&gate] { gate.open(); };
  const TicketPtr sooner = device_->to_device().submit(std::move(urgent));
  later->wait();
  sooner->wait();
  EXPECT_TRUE(overtaken);
  device_->slots().release(slot, kBytes);
  device_->slots().release(wanted, kBytes);
}

TEST_F(CudaDeviceTest, JobsOfAClassKeepTheirOrderThoughTheFirstIsReadyLast) {
  const std::vector<std::uint8_t> source = random_bytes(kBytes, 1);
  void* const slot = device_->slots().allocate(kBytes);
  Gate gate;
  std::vector<int> order;
  Job first = copy_job(slot, source);
  first.before = [&gate] { gate.wait(); };
  first.after = [&order] { order.push_back(1); };
  device_->to_device().submit(std::move(first));
  Job second = copy_job(slot, source);
  second.after = [&order] { order.push_back(2); };
  device_->to_device().submit(std::move(second));
  gate.open();
  device_->to_device().drain();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, EveryCallIsMadeOnTheDeviceOfTheBackend) {
  const std::vector<std::uint8_t> source = random_bytes(kBytes, 9);
  {
    const CudaDeviceGuard guard(1);
    cudaStream_t other_home = nullptr;
    HYDRA_CUDA(cudaStreamCreateWithFlags(&other_home, cudaStreamNonBlocking));
    compute_stream = other_home;
    HYDRA_CUDA(cudaSetDevice(0));  // the guard restores it
    const auto other = make_cuda_device(1, other_home);
    void* const slot = other->slots().allocate(kBytes);
    Job job = copy_job(slot, source);
    job.fences = {other->record()};
    const TicketPtr ticket = other->to_device().submit(std::move(job));
    other->compute_waits(*ticket);
    ticket->wait();
    other->slot_returns(ticket.get(), {other->record()});
    other->slots().release(slot, kBytes);
    int device = -1;
    HYDRA_CUDA(cudaGetDevice(&device));
    EXPECT_EQ(device, 0);
    HYDRA_CUDA(cudaSetDevice(1));
    other->to_device().drain();
    forget_cuda_error(cudaStreamSynchronize(other_home));
    compute_stream = home_;
  }
  EXPECT_FALSE(emulated_cuda::wrong_device());
}

TEST_F(CudaDeviceTest, CopiesAreInTheActivityLogByTheDevicesClockHoweverLateTheHostSeesThem) {
  const std::vector<std::uint8_t> source = random_bytes(kBytes, 4);
  void* const slot = device_->slots().allocate(kBytes);
  fill(slot, source, {})->wait();  // the log is off
  device_->activity().start(100);
  emulated_cuda::set_delays(0.002, 3);
  Gate gate;
  emulated_cuda::launch(device_->to_device_stream(), [&gate] { gate.wait(); });
  std::vector<TicketPtr> tickets;
  for (std::int32_t block = 0; block < static_cast<std::int32_t>(CudaLane::kInFlight); ++block) {
    Job job = copy_job(slot, source);
    job.label = {.block = block};
    if (block == 0) {  // the host sees the others after all have ended
      job.after = [this] { finish(device_->to_device_stream()); };
    }
    tickets.push_back(device_->to_device().submit(std::move(job)));
  }
  tickets.back()->wait_enqueued();
  gate.open();
  device_->to_device().drain();
  const ActivityRecord record = device_->activity().stop();
  ASSERT_EQ(record.activities.size(), tickets.size());
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    const Activity& copy = record.activities[i];
    EXPECT_EQ(copy.row, ActivityRow::kToDevice);
    EXPECT_EQ(copy.kind, ActivityKind::kCopy);
    EXPECT_EQ(copy.label.block, static_cast<std::int32_t>(i));
    EXPECT_EQ(copy.bytes, kBytes);
    EXPECT_NEAR(std::chrono::duration<double>(copy.end - copy.begin).count(), tickets[i]->seconds(), 1e-5);
    EXPECT_GE(copy.begin, i == 0 ? record.begin : record.activities[i - 1].end);
    EXPECT_LE(copy.end, record.end);
  }
  device_->slots().release(slot, kBytes);
}

TEST_F(CudaDeviceTest, ALongCopyIsOneActivity) {
  const std::vector<std::uint8_t> source(static_cast<std::size_t>(2 * CudaLane::kBatchBytes + 7), 4);
  void* const slot = device_->slots().allocate(static_cast<Bytes>(source.size()));
  device_->activity().start(100);
  fill(slot, source, {})->wait();
  const ActivityRecord record = device_->activity().stop();
  ASSERT_EQ(record.activities.size(), 1U);
  EXPECT_EQ(record.activities.front().bytes, static_cast<Bytes>(source.size()));
  device_->slots().release(slot, static_cast<Bytes>(source.size()));
}

TEST_F(CudaDeviceTest, NoStreamAndNoEventIsLeftBehind) {
  const int streams = emulated_cuda::streams();
  const int events = emulated_cuda::events();
  FencePtr outlives;
  {
    const auto other = make_cuda_device(0, home_);
    for (int i = 0; i < 20; ++i) {
      outlives = other->record();
      other->to_device().submit({})->wait();
    }
  }
  EXPECT_EQ(emulated_cuda::streams(), streams);
  EXPECT_GT(emulated_cuda::events(), events);
  outlives->wait();
  outlives.reset();
  EXPECT_EQ(emulated_cuda::events(), events);
}

TEST_F(CudaDeviceTest, AForkedChildLeavesTheParentsPinsAlone) {
  CudaPinner pinner(0);
  std::vector<char> region(4096);
  ASSERT_TRUE(pinner.pin(region.data(), kBytes));
  const pid_t child = ::fork();
  if (child == 0) {
    pinner.unpin(region.data(), kBytes);
    const bool refused = !pinner.pin(region.data() + 1, 1);
    ::_exit(emulated_cuda::registrations() == 1 && refused ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  pinner.unpin(region.data(), kBytes);
  EXPECT_EQ(emulated_cuda::registrations(), 0);
}

TEST_F(CudaDeviceTest, APinEndsOnTheDeviceWhereItWasMade) {
  void* const slot = device_->slots().allocate(kBytes);
  std::vector<std::uint8_t> bytes = random_bytes(kBytes, 6);
  fill(slot, bytes, {})->wait();  // the lanes' threads have made their device current
  Job back;
  back.segments = {{bytes.data(), slot, kBytes}};
  device_->to_host().submit(std::move(back))->wait();
  device_->slots().release(slot, kBytes);
  CudaPinner pinner(1);
  std::vector<char> region(4096);
  ASSERT_TRUE(pinner.pin(region.data(), kBytes));
  const std::int64_t before = emulated_cuda::calls("cudaSetDevice");
  pinner.unpin(region.data(), kBytes);
  EXPECT_EQ(emulated_cuda::calls("cudaSetDevice"), before + 2) << "there and back";
  EXPECT_EQ(emulated_cuda::registrations(), 0);
}

TEST_F(CudaDeviceTest, APinThatTheDriverRefusesLeavesTheArenaPageable) {
  CudaPinner pinner(0);
  HostArena arena(&pinner);
  emulated_cuda::fail("cudaHostRegister", cudaErrorMemoryAllocation);
  void* const pageable = arena.allocate(5000);
  void* const pinned = arena.allocate(5000);
  EXPECT_EQ(arena.pageable_bytes(), 8192);
  EXPECT_EQ(arena.pinned_bytes(), 8192);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  arena.release(pageable, 5000);
  arena.release(pinned, 5000);
  EXPECT_EQ(emulated_cuda::registrations(), 0);
}

TEST_F(CudaDeviceTest, ANumaNodeIsLookedUpByTheAddressOfTheDevice) {
  emulated_cuda::configure({.devices = 10});
  const FakeSysfs sysfs;
  sysfs.place("0000:01:00.0", "5\n");
  sysfs.place("0000:0a:00.0", "6\n");
  EXPECT_EQ(cuda_numa_node(0, sysfs.path()), 5);
  EXPECT_EQ(cuda_numa_node(9, sysfs.path()), 6) << "the system writes small letters";
  EXPECT_EQ(cuda_numa_node(1, sysfs.path()), std::nullopt);
  EXPECT_EQ(cuda_numa_node(99, sysfs.path()), std::nullopt) << "there is no such device";
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  emulated_cuda::configure({});
}

}  // namespace
}  // namespace hydra::test
