// Memory of emulated devices: capacity, addresses, reserved addresses, and what happens to a host that touches it.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "tests/cpp/emulator/runtime_support.h"

namespace emulated_cuda::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kChunk = 2 * kMiB;

class Memory : public Emulated {
 protected:
  Memory() {
    // The process has threads, so a death test starts it anew.
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  void TearDown() override { configure({}); }
};

std::size_t free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

/// Reserved addresses.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(reserve_addresses(&pointer_, bytes, 0), cudaSuccess);
  }
  ~Reserved() { EXPECT_EQ(free_addresses(pointer_, bytes_, 0), cudaSuccess); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  std::uint8_t* get() const { return static_cast<std::uint8_t*>(pointer_); }

 private:
  void* pointer_ = nullptr;
  std::size_t bytes_;
};

// ---- allocations ----------------------------------------------------------------------------------------------------

TEST_F(Memory, ADeviceHasNoMoreThanItsCapacity) {
  configure({.devices = 2, .bytes = 4 * kMiB});
  EXPECT_EQ(free_bytes(), 4 * kMiB);
  {
    const OwnMemory most(3 * kMiB);
    EXPECT_EQ(free_bytes(), kMiB);
    void* more = nullptr;
    EXPECT_EQ(cudaMalloc(&more, kMiB + 1), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&more, ~std::size_t{0}), cudaErrorMemoryAllocation);
    const OwnMemory rest(kMiB);
    EXPECT_EQ(free_bytes(), 0U);
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    EXPECT_EQ(free_bytes(), 4 * kMiB) << "the other device has its own";
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  }
  EXPECT_EQ(free_bytes(), 4 * kMiB);
}

TEST_F(Memory, TheMachineChangesOnlyWhileNoMemoryIsInUse) {
  {
    const OwnMemory memory;
    EXPECT_THROW(configure({.devices = 1}), std::logic_error);
    EXPECT_EQ(allocations(), 1U);
  }
  EXPECT_EQ(allocations(), 0U);
  EXPECT_THROW(configure({.devices = 0}), std::logic_error);
  configure({.devices = 3});
  EXPECT_EQ(cudaSetDevice(2), cudaSuccess);
}

TEST_F(Memory, EveryAllocationBeginsOnItsOwnPageAndFreedAddressesServeAgain) {
  const OwnMemory first(1);
  auto second = std::make_unique<OwnMemory>(3 * 4096);
  const OwnMemory third(1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.get()) % 4096, 0U);
  EXPECT_EQ(second->get() - first.get(), 4096);
  EXPECT_EQ(third.get() - second->get(), 3 * 4096);
  const std::uint8_t* const hole = second->get();
  second.reset();
  const OwnMemory large(4 * 4096);
  const OwnMemory small(2 * 4096);
  const OwnMemory rest(4096);
  EXPECT_GT(large.get(), third.get());
  EXPECT_EQ(small.get(), hole);
  EXPECT_EQ(rest.get(), hole + 2 * 4096);
}

TEST_F(Memory, FreeingWaitsForTheDevice) {
  const OwnStream stream;
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  Held held(stream);
  ASSERT_EQ(cudaMemsetAsync(memory, 1, kBytes, stream), cudaSuccess);
  std::atomic<bool> released{false};
  const std::jthread other([&] {
    released = true;
    held.release();
  });
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_TRUE(released.load());
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(&held), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
}

TEST_F(Memory, PointersTellWhatTheyPointTo) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const OwnMemory device;
  const Pinned pinned(bytes_of(1));
  const Bytes pageable = bytes_of(1);
  const auto attributes = [](const void* pointer) {
    cudaPointerAttributes found{};
    EXPECT_EQ(cudaPointerGetAttributes(&found, pointer), cudaSuccess);
    return found;
  };
  EXPECT_EQ(attributes(device.get() + 100).type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes(device.get() + 100).device, 1);
  EXPECT_EQ(attributes(device.get() + 2 * 4096).type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(attributes(pinned.bytes.data() + 100).type, cudaMemoryTypeHost);
  EXPECT_EQ(attributes(pageable.data()).type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(device_of(device.get() + 100), 1);
  EXPECT_EQ(device_of(pageable.data()), -1);
  EXPECT_EQ(device_of(nullptr), -1);
}

// ---- pinned memory --------------------------------------------------------------------------------------------------

TEST_F(Memory, HostMemoryIsRegisteredOnce) {
  Bytes host = bytes_of(1, 300);
  ASSERT_EQ(cudaHostRegister(host.data() + 100, 100, cudaHostRegisterDefault), cudaSuccess);
  EXPECT_EQ(registrations(), 1);
  const auto again = [&](std::size_t begin, std::size_t bytes) {
    return cudaHostRegister(host.data() + begin, bytes, cudaHostRegisterDefault);
  };
  EXPECT_EQ(again(100, 100), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(again(0, 101), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(again(199, 50), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(again(0, 300), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(again(200, 0), cudaErrorInvalidValue);
  EXPECT_EQ(again(200, 100), cudaSuccess);
  EXPECT_EQ(again(0, 100), cudaSuccess);
  EXPECT_EQ(registrations(), 3);
  void* device_pointer = nullptr;
  EXPECT_EQ(cudaHostGetDevicePointer(&device_pointer, host.data() + 5, 0), cudaSuccess);
  EXPECT_EQ(device_pointer, host.data() + 5);
  for (const std::size_t begin : {0U, 100U, 200U}) {
    EXPECT_EQ(cudaHostUnregister(host.data() + begin), cudaSuccess);
  }
  EXPECT_EQ(cudaHostUnregister(host.data()), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaHostGetDevicePointer(&device_pointer, host.data(), 0), cudaErrorInvalidValue);
  EXPECT_EQ(registrations(), 0);
}

// ---- reserved addresses ---------------------------------------------------------------------------------------------

TEST_F(Memory, ReservedAddressesGetAndLoseMemory) {
  configure({.devices = 1, .bytes = 8 * kMiB});
  const OwnStream stream;
  const Reserved range(100 * kMiB);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(range.get()) % kChunk, 0U);
  EXPECT_EQ(free_bytes(), 8 * kMiB);
  EXPECT_THROW(configure({}), std::logic_error);
  ASSERT_EQ(map_memory(range.get(), kChunk, 0), cudaSuccess);
  ASSERT_EQ(map_memory(range.get() + kChunk, 2 * kChunk, 0), cudaSuccess);
  EXPECT_EQ(free_bytes(), 2 * kMiB);
  EXPECT_EQ(map_memory(range.get() + 3 * kChunk, 2 * kChunk, 0), cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaMemsetAsync(range.get(), 5, 3 * kChunk, stream), cudaSuccess) << "one piece";
  EXPECT_EQ(contents(range.get() + kChunk - 5, stream, 10), bytes_of(5, 10));
  ASSERT_EQ(unmap_memory(range.get() + kChunk, kChunk, 0), cudaSuccess);
  EXPECT_EQ(free_bytes(), 4 * kMiB);
  EXPECT_EQ(cudaMemsetAsync(range.get(), 5, 3 * kChunk, stream), cudaErrorInvalidValue) << "a hole";
  ASSERT_EQ(map_memory(range.get() + kChunk, kChunk, 0), cudaSuccess);
  EXPECT_EQ(contents(range.get() + kChunk, stream, 10), bytes_of(0, 10)) << "new memory";
  EXPECT_EQ(contents(range.get() + 2 * kChunk, stream, 10), bytes_of(5, 10));
  EXPECT_EQ(free_addresses(range.get(), 100 * kMiB, 0), cudaErrorInvalidValue) << "memory is mapped";
  ASSERT_EQ(unmap_memory(range.get(), 3 * kChunk, 0), cudaSuccess);
  EXPECT_EQ(free_bytes(), 8 * kMiB);
}

TEST_F(Memory, OnlyWholeChunksOfOneReservationAreMapped) {
  const Reserved range(2 * kChunk);
  const Reserved next(kChunk);
  EXPECT_EQ(map_memory(range.get() + 4096, kChunk, 0), cudaErrorInvalidValue);
  EXPECT_EQ(map_memory(range.get(), 4096, 0), cudaErrorInvalidValue);
  EXPECT_EQ(map_memory(range.get(), 3 * kChunk, 0), cudaErrorInvalidValue);
  EXPECT_EQ(map_memory(range.get(), kChunk, 7), cudaErrorInvalidDevice);
  EXPECT_EQ(unmap_memory(range.get(), kChunk, 0), cudaErrorInvalidValue);
  ASSERT_EQ(map_memory(range.get(), kChunk, 0), cudaSuccess);
  EXPECT_EQ(map_memory(range.get(), 2 * kChunk, 0), cudaErrorInvalidValue);
  EXPECT_EQ(unmap_memory(range.get(), kChunk, 0), cudaSuccess);
  void* pointer = nullptr;
  EXPECT_EQ(reserve_addresses(&pointer, 4096, 0), cudaErrorInvalidValue);
}

TEST_F(Memory, UnmappingWaitsForTheDevice) {
  const OwnStream stream;
  const Reserved range(kChunk);
  ASSERT_EQ(map_memory(range.get(), kChunk, 0), cudaSuccess);
  Held held(stream);
  ASSERT_EQ(cudaMemsetAsync(range.get(), 1, kChunk, stream), cudaSuccess);
  const std::jthread other([&held] { held.release(); });
  EXPECT_EQ(unmap_memory(range.get(), kChunk, 0), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
}

// ---- the guard ------------------------------------------------------------------------------------------------------

TEST_F(Memory, DeviceAccessOpensDeviceMemoryForAScope) {
  const OwnMemory memory;
  {
    const DeviceAccess outer;
    const DeviceAccess inner;
    memory.get()[7] = 42;
  }
  EXPECT_EQ(contents(memory.get(), nullptr)[7], 42);
}

class GuardedMemory : public Memory {
 protected:
  void SetUp() override {
    if (!memory_is_guarded()) {
      GTEST_SKIP() << "this machine has no protection keys: host accesses to device memory go unseen";
    }
  }
};

TEST_F(GuardedMemory, AHostAccessEndsTheProcessWithTheNameOfTheMemory) {
  const OwnMemory memory;
  name_memory(memory.get(), 100, "weights of layer 3");
  EXPECT_DEATH(memory.get()[16] = 1, "touched device memory: cuda:0 at offset 0x10, byte 16 of 'weights of layer 3'");
  EXPECT_DEATH(std::memcpy(memory.get(), "text", 4), "byte 0 of 'weights of layer 3'");
  EXPECT_DEATH(memory.get()[100] = 1, "cuda:0 at offset 0x64, which has no name");
}

TEST_F(GuardedMemory, AnAccessAfterTheScopeOfAnotherEndsTheProcess) {
  const OwnMemory memory;
  const auto touch = [&memory] {
    {
      const DeviceAccess scope;
    }
    static_cast<volatile std::uint8_t*>(memory.get())[0] = 1;
  };
  EXPECT_DEATH(touch(), "cuda:0 at offset 0x0");
}

TEST_F(GuardedMemory, AHostFunctionIsHostCode) {
  const OwnStream stream;
  const OwnMemory memory;
  const auto touch = [](void* pointer) { *static_cast<std::uint8_t*>(pointer) = 1; };
  EXPECT_DEATH(
      {
        cudaLaunchHostFunc(stream, touch, memory.get());
        cudaStreamSynchronize(stream);
      },
      "touched device memory");
}

TEST_F(GuardedMemory, ANewNameCutsTheNamesThatLayThere) {
  const OwnMemory memory;
  name_memory(memory.get(), 300, "old");
  name_memory(memory.get() + 100, 100, "new");
  EXPECT_DEATH(memory.get()[99] = 1, "byte 99 of 'old'");
  EXPECT_DEATH(memory.get()[100] = 1, "byte 0 of 'new'");
  EXPECT_DEATH(memory.get()[299] = 1, "byte 299 of 'old'");
  name_memory(memory.get() + 50, 250, "newest");
  EXPECT_DEATH(memory.get()[49] = 1, "byte 49 of 'old'");
  EXPECT_DEATH(memory.get()[150] = 1, "byte 100 of 'newest'");
  name_memory(memory.get(), 300, "");
  EXPECT_DEATH(memory.get()[150] = 1, "which has no name");
}

TEST_F(Memory, AKernelThatTouchesFreedMemoryEndsTheProcess) {
  const OwnStream stream;
  const auto touch = [&stream] {
    void* memory = nullptr;
    cudaMalloc(&memory, kBytes);
    cudaFree(memory);
    launch(stream, [memory] { std::memset(memory, 1, 1); });
    cudaStreamSynchronize(stream);
  };
  EXPECT_DEATH(touch(), "no memory is mapped here: cuda:0 at offset 0x0");
}

// The process is new in each death test, so the first device memory is taken after the handler was set.
TEST_F(Memory, OtherFaultsGoToTheHandlerThatWasThereBefore) {
  const auto earlier = [](int /*signal*/) {
    static_cast<void>(!::write(STDERR_FILENO, "the earlier handler\n", 20));
    ::_exit(3);
  };
  const auto fault = [&earlier](bool in_device_memory) {
    ::signal(SIGSEGV, earlier);
    void* memory = nullptr;
    cudaMalloc(&memory, kBytes);
    cudaFree(memory);
    void* const nowhere = reinterpret_cast<void*>(std::uintptr_t{4096});
    static_cast<volatile std::uint8_t*>(in_device_memory ? memory : nowhere)[0] = 1;
  };
  EXPECT_EXIT(fault(false), ::testing::ExitedWithCode(3), "^the earlier handler");
  EXPECT_EXIT(fault(true), ::testing::ExitedWithCode(3),
              "cuda:0 at offset 0x0, which has no name\nthe earlier handler");
}

}  // namespace
}  // namespace emulated_cuda::test
