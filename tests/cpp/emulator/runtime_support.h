// Shared helpers of the emulator's tests: a fixture, streams, events, device memory, and a way to hold a stream back.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "emulator/cudart/control.h"

namespace emulated_cuda::test {

inline constexpr std::size_t kBytes = 4096;

using Bytes = std::vector<std::uint8_t>;

inline Bytes bytes_of(std::uint8_t value, std::size_t count = kBytes) { return Bytes(count, value); }

/// Writes to the bytes where they are.
inline void fill(Bytes& bytes, std::uint8_t value) { std::ranges::fill(bytes, value); }

/// Each test finds and leaves a machine of two devices that runs nothing and on which nothing is set.
class Emulated : public ::testing::Test {
 protected:
  Emulated() { clear(); }
  ~Emulated() override { clear(); }

 private:
  static void clear() {
    reset();
    cudaSetDevice(0);
    cudaGetLastError();
  }
};

class OwnStream {
 public:
  OwnStream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class OwnEvent {
 public:
  explicit OwnEvent(unsigned flags = cudaEventDisableTiming) {
    EXPECT_EQ(cudaEventCreateWithFlags(&event_, flags), cudaSuccess);
  }
  ~OwnEvent() { cudaEventDestroy(event_); }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class OwnMemory {
 public:
  explicit OwnMemory(std::size_t bytes = kBytes) { EXPECT_EQ(cudaMalloc(&pointer_, bytes), cudaSuccess); }
  ~OwnMemory() { cudaFree(pointer_); }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  std::uint8_t* get() const { return static_cast<std::uint8_t*>(pointer_); }

 private:
  void* pointer_ = nullptr;
};

/// Host memory that is pinned while this exists.
class Pinned {
 public:
  explicit Pinned(Bytes contents) : bytes(std::move(contents)) {
    EXPECT_EQ(cudaHostRegister(bytes.data(), bytes.size(), cudaHostRegisterPortable), cudaSuccess);
  }
  ~Pinned() { cudaHostUnregister(bytes.data()); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  Bytes bytes;
};

/// A kernel that runs until it is released.
class Held {
 public:
  explicit Held(cudaStream_t stream) {
    EXPECT_EQ(launch(stream, [released = released_] { released->wait(false); }), cudaSuccess);
  }
  ~Held() { release(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  void release() {
    *released_ = true;
    released_->notify_all();
  }

 private:
  std::shared_ptr<std::atomic<bool>> released_ = std::make_shared<std::atomic<bool>>(false);
};

/// What device memory holds once `stream` has done its work so far.
inline Bytes contents(const void* pointer, cudaStream_t stream, std::size_t count = kBytes) {
  Bytes host(count);
  EXPECT_EQ(cudaMemcpyAsync(host.data(), pointer, count, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  return host;
}

}  // namespace emulated_cuda::test
