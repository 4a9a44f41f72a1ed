// The virtual clock: what operations take, what overlaps, and how host time goes on.
#include <ctime>
#include <future>
#include <thread>

#include "tests/cpp/emulator/runtime_support.h"

namespace emulated_cuda::test {
namespace {

constexpr std::size_t kLarge = std::size_t{1} << 30;
constexpr auto kLargeBytes = static_cast<double>(kLarge);
constexpr double kClose = 0.01;  // seconds: the test's own processor time

/// A gigabyte goes over the link in 1 s, and through the host's memory in 4 s; a kernel takes as many seconds as it has
/// operations.
class UnderTheClock : public Emulated {
 protected:
  UnderTheClock() {
    start_clock({.device_memory = 8 * kLargeBytes,
                 .to_device = kLargeBytes,
                 .to_host = kLargeBytes,
                 .host_memory = kLargeBytes / 4});
    EXPECT_EQ(cudaHostAlloc(&host_, kLarge, cudaHostAllocDefault), cudaSuccess);
    begin_ = clock_report().seconds;
  }
  ~UnderTheClock() override {
    cudaFreeHost(host_);
    stop_clock();
  }

  void compute(cudaStream_t stream, double seconds) const {
    EXPECT_EQ(launch(stream, [] {}, {.half_flops = seconds}), cudaSuccess);
  }
  void copy_in(cudaStream_t stream) const {
    EXPECT_EQ(cudaMemcpyAsync(memory_.get(), host_, kLarge, cudaMemcpyHostToDevice, stream), cudaSuccess);
  }
  void copy_out(cudaStream_t stream) const {
    EXPECT_EQ(cudaMemcpyAsync(host_, memory_.get(), kLarge, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  }
  double seconds() const { return clock_report().seconds - begin_; }
  static double waited_for(Unit unit) { return clock_report().waited.at(static_cast<std::size_t>(unit)); }

  const OwnStream compute_;
  const OwnStream in_;
  const OwnStream out_;
  const OwnMemory memory_{kLarge};

 private:
  void* host_ = nullptr;
  double begin_ = 0.0;
};

TEST_F(UnderTheClock, UnitsWorkSideBySide) {
  compute(compute_, 3.0);
  copy_in(in_);
  copy_out(out_);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_NEAR(seconds(), 3.0, kClose);
}

TEST_F(UnderTheClock, OneUnitDoesOneThingAtATime) {
  copy_in(in_);
  copy_in(out_);
  compute(compute_, 0.5);
  compute(in_, 0.5);  // behind the copy of its stream
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_NEAR(seconds(), 2.0, kClose);
}

TEST_F(UnderTheClock, AnOperationThatWaitsLongHoldsNoOtherBack) {
  const OwnEvent late;
  compute(compute_, 5.0);
  EXPECT_EQ(cudaEventRecord(late, compute_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(out_, late, 0), cudaSuccess);
  copy_in(out_);
  copy_in(in_);
  EXPECT_EQ(cudaStreamSynchronize(in_), cudaSuccess);
  EXPECT_NEAR(seconds(), 1.0, kClose);
  EXPECT_EQ(cudaStreamSynchronize(out_), cudaSuccess);
  EXPECT_NEAR(seconds(), 6.0, kClose);
}

TEST_F(UnderTheClock, EventsOrderStreamsAndTellVirtualTime) {
  const OwnEvent start(cudaEventDefault);
  const OwnEvent end(cudaEventDefault);
  compute(compute_, 0.25);
  EXPECT_EQ(cudaEventRecord(start, in_), cudaSuccess);
  copy_in(in_);
  EXPECT_EQ(cudaEventRecord(end, in_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(end), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamWaitEvent(compute_, end, 0), cudaSuccess);
  compute(compute_, 1.0);
  EXPECT_EQ(cudaStreamSynchronize(compute_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(end), cudaSuccess);
  EXPECT_NEAR(seconds(), 2.0, kClose);
  float milliseconds = 0.0F;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaSuccess);
  EXPECT_NEAR(milliseconds, 1000.0F, 1.0F);
  EXPECT_NEAR(waited_for(Unit::kToDevice), 0.75, kClose);
}

TEST_F(UnderTheClock, ResultsForTheHostAreZeros) {
  std::uint64_t value = 7;
  compute(compute_, 1.0);
  EXPECT_EQ(cudaMemcpyAsync(&value, memory_.get(), sizeof value, cudaMemcpyDeviceToHost, compute_), cudaSuccess);
  EXPECT_EQ(value, 0U);
  EXPECT_NEAR(seconds(), 1.0, kClose);
}

TEST_F(UnderTheClock, TheHostsMemoryIsOneUnitForAllThreads) {
  std::thread other([] { use_host_memory(kLarge / 8); });
  use_host_memory(kLarge / 8);
  other.join();
  EXPECT_NEAR(seconds(), 1.0, kClose);
}

double processor_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Uses a processor for so many seconds.
void work(double seconds) {
  const double end = processor_seconds() + seconds;
  while (processor_seconds() < end) {
  }
}

TEST_F(UnderTheClock, AThreadThatWorksKeepsTimeFromJumping) {
  compute(compute_, 0.1);
  auto waiting = std::async(std::launch::async, [&] {
    EXPECT_EQ(cudaStreamSynchronize(compute_), cudaSuccess);
    return seconds();
  });
  work(0.05);
  const double worked = seconds();
  EXPECT_GE(worked, 0.05);
  EXPECT_LT(worked, 0.1);
  EXPECT_NEAR(waiting.get(), 0.1, kClose);
}

TEST_F(UnderTheClock, ThreadsThatLaunchKernelsAreTheProgram) {
  const double before = seconds();
  std::thread([&] {
    work(0.1);
    compute(compute_, 0.0);
    work(0.05);
  }).join();
  EXPECT_NEAR(seconds() - before, 0.05, kClose);
}

TEST_F(UnderTheClock, ChargesOfOtherThreadsAreTheirOwn) {
  start_clock({.call_seconds = 0.25});
  const double before = clock_report().seconds;
  std::thread([] { const OwnEvent event; }).join();
  EXPECT_NEAR(clock_report().seconds - before, 0.0, kClose);
}

TEST_F(UnderTheClock, APauseCostsNothing) {
  constexpr int kCalls = 20000;
  const double before = seconds();
  const double began = processor_seconds();
  for (int i = 0; i < kCalls; ++i) {
    int device = 0;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  }
  EXPECT_LT(seconds() - before, 0.5 * (processor_seconds() - began));
}

TEST_F(UnderTheClock, AGapThatIsFilledIsNoGap) {
  compute(compute_, 0.1);
  copy_in(in_);
  compute(in_, 1.0);  // after the copy
  EXPECT_NEAR(waited_for(Unit::kToDevice), 0.9, kClose);
  compute(compute_, 0.5);
  EXPECT_NEAR(waited_for(Unit::kToDevice), 0.4, kClose);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_NEAR(seconds(), 2.0, kClose);
}

TEST_F(UnderTheClock, ProcessorsWaitForAHostThatIsLate) {
  compute(compute_, 0.01);
  work(0.05);
  compute(compute_, 0.01);
  EXPECT_EQ(cudaStreamSynchronize(compute_), cudaSuccess);
  EXPECT_NEAR(waited_for(Unit::kNone), 0.04, kClose);
}

TEST_F(UnderTheClock, CallsOfTheRuntimeAreCharged) {
  start_clock({.launch_seconds = 1.0, .call_seconds = 0.25});
  const double before = clock_report().seconds;
  const OwnEvent event;
  compute(compute_, 0.0);
  EXPECT_NEAR(clock_report().seconds - before, 1.5, kClose);
}

}  // namespace
}  // namespace emulated_cuda::test
