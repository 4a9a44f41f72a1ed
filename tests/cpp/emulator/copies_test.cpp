// Copies of the emulated runtime: when each reads and writes, and which are refused.
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "tests/cpp/emulator/runtime_support.h"

namespace emulated_cuda::test {
namespace {

class Copies : public Emulated {};

TEST_F(Copies, APinnedSourceIsReadInTheStreamsTurn) {
  const OwnStream stream;
  const OwnMemory memory;
  Pinned source(bytes_of(1));
  Held held(stream);
  ASSERT_EQ(cudaMemcpyAsync(memory.get(), source.bytes.data(), kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
  fill(source.bytes, 2);
  held.release();
  EXPECT_EQ(contents(memory.get(), stream), bytes_of(2));
}

TEST_F(Copies, AllocatedHostMemoryIsPinned) {
  const OwnStream stream;
  const OwnMemory memory;
  void* source = nullptr;
  ASSERT_EQ(cudaHostAlloc(&source, 100, cudaHostAllocDefault), cudaSuccess);
  std::fill_n(static_cast<std::uint8_t*>(source), 100, std::uint8_t{1});
  Held held(stream);
  ASSERT_EQ(cudaMemcpyAsync(memory.get(), source, 100, cudaMemcpyDefault, stream), cudaSuccess);
  std::fill_n(static_cast<std::uint8_t*>(source), 100, std::uint8_t{2});
  held.release();
  EXPECT_EQ(contents(memory.get(), stream, 100), bytes_of(2, 100));
  EXPECT_EQ(cudaFreeHost(source), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(source), cudaErrorInvalidValue);
}

TEST_F(Copies, APageableSourceIsReadBeforeTheCallReturns) {
  const OwnStream stream;
  const OwnMemory memory;
  Bytes source = bytes_of(1);
  Held held(stream);
  ASSERT_EQ(cudaMemcpyAsync(memory.get(), source.data(), kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
  fill(source, 2);
  held.release();
  EXPECT_EQ(contents(memory.get(), stream), bytes_of(1));
}

TEST_F(Copies, BytesThatLeavePinnedMemoryArePageable) {
  const OwnStream stream;
  const OwnMemory memory;
  Bytes source = bytes_of(1);
  ASSERT_EQ(cudaHostRegister(source.data(), kBytes - 1, cudaHostRegisterDefault), cudaSuccess);
  Held held(stream);
  ASSERT_EQ(cudaMemcpyAsync(memory.get(), source.data(), kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
  fill(source, 2);
  held.release();
  EXPECT_EQ(contents(memory.get(), stream), bytes_of(1));
  EXPECT_EQ(cudaHostUnregister(source.data()), cudaSuccess);
}

TEST_F(Copies, APinnedDestinationIsWrittenInTheStreamsTurn) {
  const OwnStream stream;
  const OwnMemory memory;
  const Pinned destination(bytes_of(1));
  ASSERT_EQ(cudaMemsetAsync(memory.get(), 2, kBytes, stream), cudaSuccess);
  Held held(stream);
  void* const to = const_cast<std::uint8_t*>(destination.bytes.data());
  ASSERT_EQ(cudaMemcpyAsync(to, memory.get(), kBytes, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(destination.bytes, bytes_of(1));
  held.release();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(destination.bytes, bytes_of(2));
}

TEST_F(Copies, APageableDestinationIsWrittenBeforeTheCallReturns) {
  const OwnStream stream;
  const OwnMemory memory;
  Held held(stream);
  ASSERT_EQ(cudaMemsetAsync(memory.get(), 2, kBytes, stream), cudaSuccess);
  std::atomic<bool> released{false};
  const std::jthread other([&] {
    released = true;
    held.release();
  });
  EXPECT_EQ(contents(memory.get(), stream), bytes_of(2));
  EXPECT_TRUE(released.load());
}

TEST_F(Copies, CopiesWithoutAStreamWaitUnlessTheyReadPageableMemoryOrStayOnTheDevice) {
  const OwnMemory memory;
  const OwnMemory copied;
  Pinned pinned(bytes_of(1));
  EXPECT_EQ(cudaMemcpy(memory.get(), pinned.bytes.data(), kBytes, cudaMemcpyHostToDevice), cudaSuccess);
  fill(pinned.bytes, 2);
  EXPECT_EQ(contents(memory.get(), nullptr), bytes_of(1));
  Held held(nullptr);
  EXPECT_EQ(cudaMemcpy(memory.get(), bytes_of(3).data(), kBytes, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(copied.get(), memory.get(), kBytes, cudaMemcpyDeviceToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemset(memory.get(), 4, kBytes), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  held.release();
  EXPECT_EQ(contents(copied.get(), nullptr), bytes_of(3));
  EXPECT_EQ(contents(memory.get(), nullptr), bytes_of(4));
}

TEST_F(Copies, CopiesGoBetweenDevices) {
  const OwnStream stream;
  const OwnMemory here;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const OwnMemory there;
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(here.get(), 7, kBytes, stream), cudaSuccess);
  ASSERT_EQ(cudaMemcpyPeerAsync(there.get(), 1, here.get(), 0, kBytes, stream), cudaSuccess);
  EXPECT_EQ(contents(there.get(), stream), bytes_of(7));
  EXPECT_EQ(cudaMemcpyPeerAsync(there.get(), 0, here.get(), 0, kBytes, stream), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyPeerAsync(there.get(), 2, here.get(), 0, kBytes, stream), cudaErrorInvalidDevice);
}

TEST_F(Copies, CopiesOfTheWrongKindOrOutsideOfAnAllocationAreRefused) {
  const OwnStream stream;
  const OwnMemory memory;
  Bytes host = bytes_of(1, 2 * kBytes);
  const auto copy = [&](void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, stream);
  };
  EXPECT_EQ(copy(memory.get(), host.data(), kBytes, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(copy(host.data(), memory.get(), kBytes, cudaMemcpyHostToHost), cudaErrorInvalidValue);
  EXPECT_EQ(copy(memory.get(), host.data(), kBytes + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(copy(memory.get() + 1, host.data(), kBytes, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(copy(host.data(), memory.get() - 1, 1, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(copy(nullptr, nullptr, 0, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(host.data(), 0, 1, stream), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace emulated_cuda::test
