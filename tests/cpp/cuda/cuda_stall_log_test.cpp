// Stalls of a stream, in virtual time: how long it stood still between its work, and not how long a wait took.
#include "csrc/transfer/cuda/cuda_stall_log.h"
#include "tests/cpp/emulator/runtime_support.h"

namespace hydra::test {
namespace {

using emulated_cuda::test::Emulated;
using emulated_cuda::test::OwnEvent;
using emulated_cuda::test::OwnMemory;
using emulated_cuda::test::OwnStream;

constexpr std::size_t kLarge = std::size_t{1} << 30;
constexpr double kClose = 0.02;  // seconds: the test's own processor time

/// A copy takes a second, and a kernel as many seconds as it has operations.
class StallLogTest : public Emulated {
 protected:
  StallLogTest() {
    emulated_cuda::start_clock({.to_device = static_cast<double>(kLarge)});
    EXPECT_EQ(cudaHostAlloc(&host_, kLarge, cudaHostAllocDefault), cudaSuccess);
    log_.start();
  }
  ~StallLogTest() override {
    cudaFreeHost(host_);
    emulated_cuda::stop_clock();
  }

  void compute(double seconds) const {
    EXPECT_EQ(emulated_cuda::launch(stream_, [] {}, {.half_flops = seconds}), cudaSuccess);
  }
  void copy() {
    EXPECT_EQ(cudaMemcpyAsync(memory_.get(), host_, kLarge, cudaMemcpyHostToDevice, lane_), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(copied_, lane_), cudaSuccess);
  }
  /// The stream waits for the copies so far.
  void hold_back() {
    const Stall stall(&log_);
    EXPECT_EQ(cudaStreamWaitEvent(stream_, copied_, 0), cudaSuccess);
  }
  /// The host does.
  void wait() {
    const Stall stall(&log_);
    EXPECT_EQ(cudaEventSynchronize(copied_), cudaSuccess);
  }
  double seconds() { return log_.seconds(0, log_.count()); }

  const OwnStream stream_;
  const OwnStream lane_;
  const OwnEvent copied_;
  const OwnMemory memory_{kLarge};
  CudaStallLog log_{0, [this] { return static_cast<cudaStream_t>(stream_); }};

 private:
  void* host_ = nullptr;
};

TEST_F(StallLogTest, CountsWhatTheStreamWaitedBehindItsWork) {
  compute(0.25);
  copy();
  hold_back();
  compute(0.5);
  EXPECT_NEAR(seconds(), 0.75, kClose);
}

TEST_F(StallLogTest, CountsNothingOfAWaitThatComputeCovers) {
  compute(2.0);
  copy();
  hold_back();
  wait();
  compute(0.5);
  EXPECT_NEAR(seconds(), 0.0, kClose);
}

TEST_F(StallLogTest, CountsWhatTheHostsWaitLeftTheStreamWithoutWork) {
  compute(0.25);
  copy();
  wait();
  compute(0.5);
  EXPECT_NEAR(seconds(), 0.75, kClose);
}

TEST_F(StallLogTest, AStallInsideOneIsPartOfIt) {
  copy();
  {
    const Stall stall(&log_);
    hold_back();
    wait();
  }
  EXPECT_EQ(log_.count(), 1);
  EXPECT_NEAR(seconds(), 1.0, kClose);
}

TEST_F(StallLogTest, TellsEachStallAndNothingWhileItIsOff) {
  copy();
  hold_back();
  copy();
  copy();
  hold_back();
  EXPECT_EQ(log_.count(), 2);
  EXPECT_NEAR(log_.seconds(0, 1), 1.0, kClose);
  EXPECT_NEAR(log_.seconds(1, 2), 2.0, kClose);
  log_.stop();
  copy();
  hold_back();
  EXPECT_EQ(log_.count(), 2);
  log_.start();
  EXPECT_EQ(log_.count(), 0);
}

}  // namespace
}  // namespace hydra::test
