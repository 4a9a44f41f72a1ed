// The emulated runtime: what orders operations, events, and the last errors and handles of threads.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "emulator/cudart/stream.h"
#include "tests/cpp/emulator/runtime_support.h"

namespace emulated_cuda::test {
namespace {

using namespace cudart;

class Runtime : public Emulated {};

// ---- order ----------------------------------------------------------------------------------------------------------

TEST_F(Runtime, AStreamThatWaitsForAnEventSeesTheWorkBeforeIt) {
  const OwnStream first;
  const OwnStream second;
  const OwnEvent event;
  int value = 0;
  int seen = -1;
  Held held(first);
  launch(first, [&value] { value = 1; });
  ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second, event, 0), cudaSuccess);
  launch(second, [&] { seen = value; });
  EXPECT_EQ(cudaStreamQuery(second), cudaErrorNotReady);
  held.release();
  EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(seen, 1);
}

TEST_F(Runtime, NothingElseOrdersStreams) {
  const OwnStream first;
  const OwnStream second;
  for (const auto& [blocked, free] : std::vector<std::pair<cudaStream_t, cudaStream_t>>{
           {first, second}, {first, nullptr}, {nullptr, first}, {nullptr, second}}) {
    const Held held(blocked);
    std::atomic<bool> ran{false};
    launch(free, [&ran] { ran = true; });
    EXPECT_EQ(cudaStreamSynchronize(free), cudaSuccess);
    EXPECT_TRUE(ran.load());
    EXPECT_EQ(cudaStreamQuery(blocked), cudaErrorNotReady);
  }
}

TEST_F(Runtime, AWaitConcernsTheRecordingThatWasTheLatestThen) {
  const OwnStream first;
  const OwnStream second;
  const OwnEvent event;
  ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second, event, 0), cudaSuccess);
  const Held held(first);
  ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
}

TEST_F(Runtime, ADestroyedStreamHasDoneItsWork) {
  std::atomic<int> ran{0};
  std::jthread other;
  {
    const OwnStream stream;
    auto held = std::make_shared<Held>(stream);
    for (int i = 0; i < 10; ++i) {
      launch(stream, [&ran] { ++ran; });
    }
    other = std::jthread([held] { held->release(); });
  }
  EXPECT_EQ(ran.load(), 10);
}

TEST_F(Runtime, HostFunctionsRunInTheStreamsTurn) {
  const OwnStream stream;
  std::vector<int> order;
  launch(stream, [&order] { order.push_back(1); });
  const auto second = [](void* data) { static_cast<std::vector<int>*>(data)->push_back(2); };
  ASSERT_EQ(cudaLaunchHostFunc(stream, second, &order), cudaSuccess);
  launch(stream, [&order] { order.push_back(3); });
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST_F(Runtime, DelaysShowAWaitThatIsMissing) {
  const OwnStream first;
  const OwnStream second;
  const OwnEvent event;
  int missed = 0;
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    set_delays(0.001, seed);
    for (int round = 0; round < 32; ++round) {
      std::atomic<int> value{0};
      launch(first, [&value] { value = 1; });
      launch(second, [&] { missed += value == 0 ? 1 : 0; });
      cudaEventRecord(event, first);
      cudaStreamWaitEvent(second, event, 0);
      launch(second, [&] { wrong += value == 0 ? 1 : 0; });
      cudaStreamSynchronize(second);
    }
  }
  EXPECT_GT(missed, 0);
  EXPECT_EQ(wrong, 0);
}

TEST_F(Runtime, DelaysFollowFromTheSeedAndTheNumberOfTheStream) {
  constexpr int kOperations = 800;
  const auto drawn = [](std::uint64_t seed, int number) {
    Delays delays;
    delays.set(0.5, seed, number);
    std::vector<Clock::duration> found;
    for (int i = 0; i < kOperations; ++i) {
      found.push_back(delays.next());
    }
    return found;
  };
  const auto once = drawn(7, 1);
  EXPECT_EQ(drawn(7, 1), once);
  EXPECT_NE(drawn(8, 1), once);
  EXPECT_NE(drawn(7, 2), once);
  EXPECT_NE(drawn(7 + (std::uint64_t{1} << 32U), 1), once);
  EXPECT_LE(*std::ranges::max_element(once), std::chrono::milliseconds(500));
  EXPECT_NEAR(static_cast<double>(std::ranges::count(once, Clock::duration{})), kOperations * 7 / 8, 50);
}

TEST_F(Runtime, AnOperationWaitsItsDelay) {
  const Fault fault{cudaSuccess};
  Delays delays;
  delays.set(0.001, 5, 40);
  Clock::duration least{};
  Stream stream(0, 40, 0, fault);
  stream.set_delays(0.001, 5);
  const Clock::time_point begin = Clock::now();
  PointPtr end;
  for (int i = 0; i < 100; ++i) {
    least += delays.next();
    end = stream.mark();
  }
  end->wait();
  EXPECT_GT(least, Clock::duration{});
  EXPECT_GE(end->time() - begin, least);
}

// ---- events ---------------------------------------------------------------------------------------------------------

TEST_F(Runtime, AnEventThatWasNeverRecordedIsReached) {
  const OwnStream stream;
  const OwnEvent event;
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

TEST_F(Runtime, EventsMeasureTheTimeBetweenThem) {
  const OwnStream stream;
  const OwnEvent start(cudaEventDefault);
  const OwnEvent end(cudaEventDefault);
  const OwnEvent untimed;
  float milliseconds = -1.0F;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorInvalidResourceHandle);
  ASSERT_EQ(cudaEventRecord(start, stream), cudaSuccess);
  Held held(stream);
  ASSERT_EQ(cudaEventRecord(end, stream), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(untimed, stream), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorNotReady);
  held.release();
  ASSERT_EQ(cudaEventSynchronize(untimed), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaSuccess);
  EXPECT_GT(milliseconds, 0.0F);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, untimed), cudaErrorInvalidResourceHandle);
}

TEST_F(Runtime, AnEventBelongsToItsDevice) {
  const OwnEvent event;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const OwnStream other;
  EXPECT_EQ(cudaEventRecord(event, other), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess) << "waits may cross devices";
  EXPECT_FALSE(wrong_device());
}

// ---- errors of threads ----------------------------------------------------------------------------------------------

TEST_F(Runtime, TheLastErrorOfAThreadStaysUntilItIsTaken) {
  const OwnStream stream;
  const OwnEvent event;
  const Held held(stream);
  ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  ASSERT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  int device = -1;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorNotReady);
  std::async(std::launch::async, [] { EXPECT_EQ(cudaGetLastError(), cudaSuccess); }).get();
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(Runtime, HandlesThatWereDestroyedAreRefused) {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -100), cudaSuccess);
  int priority = 0;
  EXPECT_EQ(cudaStreamGetPriority(stream, &priority), cudaSuccess);
  EXPECT_EQ(priority, kGreatestPriority);
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventDestroy(event), cudaErrorInvalidResourceHandle);
}

TEST_F(Runtime, StreamsThatTheDefaultStreamOrdersDoNotExist) {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamDefault), cudaErrorNotSupported);
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, 77), cudaErrorInvalidValue);
}

TEST_F(Runtime, ErrorsHaveNamesAndTexts) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorIllegalAddress), "cudaErrorIllegalAddress");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
  EXPECT_STREQ(cudaGetErrorName(static_cast<cudaError_t>(12345)), "unrecognized error code");
}

// ---- devices --------------------------------------------------------------------------------------------------------

TEST_F(Runtime, TheDevicesAreCardsOfOneKind) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 2);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  cudaDeviceProp card{};
  ASSERT_EQ(cudaGetDeviceProperties(&card, 1), cudaSuccess);
  EXPECT_STREQ(card.name, "Emulated H100");
  int major = 0;
  int shared = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  EXPECT_EQ(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), cudaSuccess);
  EXPECT_EQ(major, card.major);
  EXPECT_EQ(static_cast<std::size_t>(shared), card.sharedMemPerBlockOptin);
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrMaxTexture1DWidth, 0), cudaErrorInvalidValue);
  std::array<char, 16> id{};
  EXPECT_EQ(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), 1), cudaSuccess);
  EXPECT_STREQ(id.data(), "0000:02:00.0");
  EXPECT_EQ(cudaDeviceGetPCIBusId(id.data(), 12, 1), cudaErrorInvalidValue);
  int can = -1;
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, 0, 1), cudaSuccess);
  EXPECT_EQ(can, 1);
}

TEST_F(Runtime, UseOfAnotherDevicesStreamIsNoted) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const OwnStream other;
  const OwnMemory memory;
  launch(other, [] {});
  EXPECT_FALSE(wrong_device());
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(memory.get(), 0, kBytes, other), cudaSuccess);
  EXPECT_TRUE(wrong_device());
  EXPECT_EQ(launch(other, [] {}), cudaErrorInvalidResourceHandle) << "kernels may not cross devices";
}

// ---- threads and processes ------------------------------------------------------------------------------------------

TEST_F(Runtime, AStreamsThreadCannotWaitForIt) {
  const OwnStream stream;
  std::vector<cudaError_t> errors;
  bool there = false;
  launch(stream, [&] {
    there = on_stream_thread();
    errors = {cudaStreamSynchronize(stream), cudaDeviceSynchronize(), cudaFree(nullptr), cudaStreamDestroy(stream)};
  });
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(errors, std::vector<cudaError_t>(4, cudaErrorNotPermitted));
  EXPECT_TRUE(there);
  EXPECT_FALSE(on_stream_thread());
}

TEST_F(Runtime, CallsInAForkedChildFail) {
  const OwnStream stream;
  const pid_t child = ::fork();
  if (child == 0) {
    void* memory = nullptr;
    const bool refused = cudaMalloc(&memory, kBytes) == cudaErrorInitializationError &&
                         cudaStreamSynchronize(stream) == cudaErrorInitializationError &&
                         cudaSetDevice(0) == cudaErrorInitializationError &&
                         launch(stream, [] {}) == cudaErrorInitializationError;
    ::_exit(refused && streams() >= 1 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(Runtime, ManyThreadsUseOneMachine) {
  const auto work = [](std::uint8_t value) {
    const OwnStream stream;
    const OwnEvent event;
    for (int round = 0; round < 30; ++round) {
      const OwnMemory memory;
      const Pinned source(bytes_of(value));
      const void* const from = source.bytes.data();
      ASSERT_EQ(cudaMemcpyAsync(memory.get(), from, kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
      ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamWaitEvent(nullptr, event, 0), cudaSuccess);
      EXPECT_EQ(contents(memory.get(), nullptr), bytes_of(value));
    }
  };
  std::vector<std::jthread> threads;
  for (const std::uint8_t value : {1, 2, 3, 4}) {
    threads.emplace_back(work, value);
  }
}

}  // namespace
}  // namespace emulated_cuda::test
