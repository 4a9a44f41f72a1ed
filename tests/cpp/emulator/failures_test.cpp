// Failures of the emulated runtime: faults of devices, scripted errors of calls, and calls during a capture.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "emulator/cudart/stream.h"
#include "tests/cpp/emulator/runtime_support.h"

namespace emulated_cuda::test {
namespace {

using namespace cudart;

class Failures : public Emulated {};

// ---- failures of devices --------------------------------------------------------------------------------------------

TEST_F(Failures, AFaultEndsEveryWaitAndIsTheErrorOfEveryLaterCall) {
  const OwnStream stream;
  const OwnStream second;
  const OwnEvent event;
  const auto memory = std::make_unique<OwnMemory>();
  {
    const Held held(stream);
    std::atomic<bool> ran{false};
    launch(stream, [&ran] { ran = true; });
    ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(second, event, 0), cudaSuccess);
    std::vector<std::future<cudaError_t>> waits;
    const auto wait = [&waits](auto call) { waits.push_back(std::async(std::launch::async, call)); };
    wait([&] { return cudaEventSynchronize(event); });
    wait([&] { return cudaStreamSynchronize(second); });
    wait([] { return cudaDeviceSynchronize(); });
    wait([&] {
      Bytes host(kBytes);
      return cudaMemcpyAsync(host.data(), memory->get(), kBytes, cudaMemcpyDeviceToHost, stream);
    });
    while (calls("cudaMemcpyAsync") + calls("cudaDeviceSynchronize") + calls("cudaEventSynchronize") < 3) {
      std::this_thread::yield();
    }
    set_fault(0, cudaErrorECCUncorrectable);
    for (auto& result : waits) {
      EXPECT_EQ(result.get(), cudaErrorECCUncorrectable);
    }
    EXPECT_EQ(cudaEventQuery(event), cudaErrorECCUncorrectable);
    EXPECT_EQ(launch(second, [] {}), cudaErrorECCUncorrectable);
    EXPECT_EQ(cudaGetLastError(), cudaErrorECCUncorrectable);
    EXPECT_EQ(cudaGetLastError(), cudaErrorECCUncorrectable) << "it cannot be cleared";
    EXPECT_EQ(cudaFree(memory->get()), cudaErrorECCUncorrectable);
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess) << "the other device works";
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorECCUncorrectable);
    EXPECT_FALSE(ran.load());
  }
  reset();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
}

TEST_F(Failures, AFailedDeviceTakesBackWhatWasMade) {
  const int streams_before = streams();
  const int events_before = events();
  const std::size_t allocations_before = allocations();
  auto held = std::optional<Held>();
  {
    const OwnStream stream;
    const OwnEvent event;
    const OwnMemory memory;
    const Pinned pinned(bytes_of(1));
    held.emplace(stream);
    set_fault(0, cudaErrorAssert);
  }
  EXPECT_EQ(streams(), streams_before);
  EXPECT_EQ(events(), events_before);
  EXPECT_EQ(registrations(), 0);
  held.reset();
  reset();
  EXPECT_EQ(allocations(), allocations_before);
}

TEST_F(Failures, AStreamThatWaitsForAnotherDeviceGoesOnWhenItsOwnFails) {
  for (const auto head_start : {std::chrono::milliseconds(0), std::chrono::milliseconds(20)}) {
    Fault fault{cudaSuccess};
    const auto never = std::make_shared<Point>();
    Stream stream(0, 99, 0, fault);
    stream.follow(never);
    const PointPtr end = stream.mark();
    std::this_thread::sleep_for(head_start);  // after it the stream most likely waits; the test holds either way
    fault = cudaErrorUnknown;
    stream.drop();
    end->wait();
    stream.drain();
    EXPECT_FALSE(never->reached());
  }
}

TEST_F(Failures, AnExceptionOfAKernelIsAFaultOfItsDevice) {
  const OwnStream stream;
  launch(stream, [] { throw std::runtime_error("an index out of range"); });
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorLaunchFailure);
}

TEST_F(Failures, PinnedMemoryThatEndsUnderACopyIsAFault) {
  const OwnStream stream;
  const OwnMemory memory;
  for (const bool registered : {true, false}) {
    auto source = std::make_unique<Bytes>(bytes_of(1));
    void* allocated = nullptr;
    ASSERT_EQ(cudaHostAlloc(&allocated, kBytes, cudaHostAllocDefault), cudaSuccess);
    ASSERT_EQ(cudaHostRegister(source->data(), kBytes, cudaHostRegisterDefault), cudaSuccess);
    Held held(stream);
    const void* const from = registered ? source->data() : allocated;
    ASSERT_EQ(cudaMemcpyAsync(memory.get(), from, kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
    if (registered) {
      EXPECT_EQ(cudaHostUnregister(source->data()), cudaErrorIllegalAddress);
      source.reset();
    }
    EXPECT_EQ(cudaFreeHost(allocated), cudaErrorIllegalAddress);
    held.release();
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
    reset();
    cudaGetLastError();
    if (!registered) {
      EXPECT_EQ(cudaHostUnregister(source->data()), cudaSuccess);
    }
  }
}

TEST_F(Failures, PinnedMemoryMayEndAfterTheWaitForItsCopies) {
  const OwnStream stream;
  const OwnEvent event;
  const OwnMemory memory;
  set_delays(0.0005, 1);
  for (int round = 0; round < 50; ++round) {
    const Bytes source = bytes_of(static_cast<std::uint8_t>(round));
    void* const from = const_cast<std::uint8_t*>(source.data());
    ASSERT_EQ(cudaHostRegister(from, kBytes, cudaHostRegisterDefault), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(memory.get(), from, kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    ASSERT_EQ(cudaEventSynchronize(event), cudaSuccess);
    ASSERT_EQ(cudaHostUnregister(from), cudaSuccess);
    ASSERT_EQ(cudaStreamQuery(stream), cudaSuccess);
  }
}

// ---- what tests set -------------------------------------------------------------------------------------------------

TEST_F(Failures, AScriptedFailureComesOnceAfterItsSuccesses) {
  const OwnStream stream;
  const OwnMemory memory;
  fail("cudaMemsetAsync", cudaErrorUnknown, 2);
  for (const cudaError_t expected : {cudaSuccess, cudaSuccess, cudaErrorUnknown, cudaSuccess}) {
    EXPECT_EQ(cudaMemsetAsync(memory.get(), 0, kBytes, stream), expected);
  }
  EXPECT_EQ(cudaGetLastError(), cudaErrorUnknown);
  EXPECT_EQ(calls("cudaMemsetAsync"), 4);
  fail("cudaLaunchKernel", cudaErrorInvalidConfiguration);
  std::atomic<bool> ran{false};
  EXPECT_EQ(launch(stream, [&ran] { ran = true; }), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_FALSE(ran.load());
  fail("cudaMemsetAsync", cudaErrorUnknown);
  reset();
  EXPECT_EQ(calls("cudaMemsetAsync"), 0);
  EXPECT_EQ(cudaMemsetAsync(memory.get(), 0, kBytes, stream), cudaSuccess);
}

TEST_F(Failures, AScriptedFailureOfAWaitComesAfterIt) {
  const OwnStream stream;
  const OwnEvent event;
  for (const std::string name : {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"}) {
    Held held(stream);
    std::atomic<bool> ran{false};
    launch(stream, [&ran] { ran = true; });
    ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    fail(name, cudaErrorUnknown);
    const std::jthread other([&held] { held.release(); });
    EXPECT_EQ(name == "cudaStreamSynchronize"  ? cudaStreamSynchronize(stream)
              : name == "cudaEventSynchronize" ? cudaEventSynchronize(event)
                                               : cudaDeviceSynchronize(),
              cudaErrorUnknown);
    EXPECT_TRUE(ran.load()) << name;
  }
}

TEST_F(Failures, UnsafeCallsAreRefusedDuringACaptureUnlessTheThreadIsRelaxed) {
  const OwnStream stream;
  const OwnEvent event;
  const auto unsafe = [&] {
    void* memory = nullptr;
    const std::set<cudaError_t> errors{cudaEventQuery(event), cudaEventSynchronize(event),
                                       cudaStreamSynchronize(stream), cudaMalloc(&memory, kBytes)};
    cudaFree(memory);
    EXPECT_EQ(errors.size(), 1U);
    return *errors.begin();
  };
  EXPECT_EQ(unsafe(), cudaSuccess);
  set_capturing(stream, true);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  EXPECT_EQ(unsafe(), cudaErrorStreamCaptureUnsupported);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(unsafe(), cudaSuccess);
  EXPECT_EQ(std::async(std::launch::async, unsafe).get(), cudaErrorStreamCaptureUnsupported) << "a mode is a thread's";
  ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  set_capturing(stream, false);
  EXPECT_EQ(unsafe(), cudaSuccess);
}

TEST_F(Failures, ACaptureEndsWithItsStream) {
  {
    const OwnStream stream;
    set_capturing(stream, true);
  }
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
}

}  // namespace
}  // namespace emulated_cuda::test
