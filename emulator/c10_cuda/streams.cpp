// c10/cuda/CUDAStream.h on the emulated runtime.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <utility>

namespace c10::cuda {

namespace {

constexpr unsigned kStreamsPerPool = 32;

/// A stream of a pool. Its id is odd. The id of the default stream is 0, and that of a stream from outside is its
/// handle, which is even.
struct PoolStream {
  unsigned level = 0;  // the priority, negated
  unsigned index = 0;

  StreamId id() const { return static_cast<StreamId>((index * max_compile_time_stream_priorities + level) << 1 | 1U); }
  static bool is_one(StreamId id) { return (id & 1) != 0; }
  static PoolStream from(StreamId id) {
    const auto number = static_cast<unsigned>(id >> 1);
    return {.level = number % max_compile_time_stream_priorities, .index = number / max_compile_time_stream_priorities};
  }
};

/// The streams of all devices that torch has made. Each is made when its handle is first asked for: a stream of the
/// emulated runtime is a thread.
class StreamPools {
 public:
  PoolStream next(DeviceIndex device, unsigned level) {
    const std::lock_guard lock(mutex_);
    return {.level = level, .index = pools_[{device, level}].given++ % kStreamsPerPool};
  }

  cudaStream_t handle(DeviceIndex device, PoolStream stream) {
    TORCH_CHECK(stream.index < kStreamsPerPool, "not the id of a CUDA stream: ", stream.id());
    const std::lock_guard lock(mutex_);
    cudaStream_t& handle = pools_[{device, stream.level}].handles[stream.index];
    if (handle == nullptr) {
      const CUDAGuard guard(device);
      C10_CUDA_CHECK(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, -static_cast<int>(stream.level)));
    }
    return handle;
  }

 private:
  struct Pool {
    unsigned given = 0;
    std::array<cudaStream_t, kStreamsPerPool> handles{};
  };
  std::mutex mutex_;
  std::map<std::pair<DeviceIndex, unsigned>, Pool> pools_;
};

/// Never destroyed, on purpose: threads may use streams until the process ends.
StreamPools& pools() {
  static auto* const instance = std::make_unique<StreamPools>().release();
  return *instance;
}

thread_local std::array<StreamId, C10_COMPILE_TIME_MAX_GPUS> current_ids{};

CUDAStream stream_of(DeviceIndex device, StreamId id) {
  return CUDAStream(CUDAStream::UNCHECKED, Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), id));
}

/// -1 is the current device.
DeviceIndex known_device(DeviceIndex device) {
  if (device == -1) {
    return current_device();
  }
  TORCH_CHECK(device >= 0 && device < device_count(), "there is no CUDA device ", static_cast<int>(device));
  return device;
}

unsigned highest_level() { return static_cast<unsigned>(-std::get<1>(CUDAStream::priority_range())); }

CUDAStream next_of_pool(DeviceIndex device, unsigned level) {
  const DeviceIndex known = known_device(device);
  return stream_of(known, pools().next(known, level).id());
}

}  // namespace

cudaStream_t CUDAStream::stream() const {
  const StreamId stream = id();
  if (PoolStream::is_one(stream)) {
    return pools().handle(device_index(), PoolStream::from(stream));
  }
  return reinterpret_cast<cudaStream_t>(stream);
}

bool CUDAStream::query() const {
  const CUDAGuard guard(device());
  const cudaError_t status = cudaStreamQuery(stream());
  if (status == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

void CUDAStream::synchronize() const {
  const CUDAGuard guard(device());
  stream_synchronize(stream());
}

CUDAStream getStreamFromPool(const bool isHighPriority, DeviceIndex device) {
  return next_of_pool(device, isHighPriority ? highest_level() : 0);
}

CUDAStream getStreamFromPool(const int priority, DeviceIndex device) {
  TORCH_CHECK(priority <= 0, "a CUDA stream's priority is 0 or less, not ", priority);
  return next_of_pool(device, std::min(static_cast<unsigned>(-priority), highest_level()));
}

CUDAStream getStreamFromExternal(cudaStream_t ext_stream, DeviceIndex device_index) {
  return stream_of(device_index, reinterpret_cast<StreamId>(ext_stream));
}

CUDAStream getDefaultCUDAStream(DeviceIndex device_index) { return stream_of(known_device(device_index), 0); }

CUDAStream getCurrentCUDAStream(DeviceIndex device_index) {
  const DeviceIndex device = known_device(device_index);
  return stream_of(device, current_ids.at(static_cast<std::size_t>(device)));
}

void setCurrentCUDAStream(CUDAStream stream) {
  current_ids.at(static_cast<std::size_t>(known_device(stream.device_index()))) = stream.id();
}

std::ostream& operator<<(std::ostream& stream, const CUDAStream& s) { return stream << s.unwrap(); }

}  // namespace c10::cuda
