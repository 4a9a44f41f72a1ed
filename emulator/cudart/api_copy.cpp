// CUDA's copies and fills.
//
// Pageable memory is read before a call returns, and written before it returns. Pinned memory is read and written in
// the stream's turn. So code that forgets to wait reads or sends wrong bytes.
#include <cstring>
#include <memory>
#include <utility>

#include "emulator/cudart/call.h"

namespace {

using namespace emulated_cuda;
using namespace emulated_cuda::cudart;

enum class Place { kDevice, kPinned, kPageable };

/// One side of a copy.
struct Side {
  Place place = Place::kPageable;
  std::shared_ptr<void> kept;  // the pinned memory that is in flight, or the copy of pageable memory
};

/// False if the bytes begin in a device's memory and leave it.
bool locate(const void* pointer, std::size_t bytes, int stream_device, Side& side) {
  Machine& machine = Machine::get();
  if (const int device = device_of(pointer); device >= 0) {
    side.place = Place::kDevice;
    return machine.device(device).memory.holds(pointer, bytes);
  }
  side.kept = machine.pinned.use(pointer, bytes, stream_device);
  side.place = side.kept ? Place::kPinned : Place::kPageable;
  return true;
}

bool fits(cudaMemcpyKind kind, const Side& destination, const Side& source) {
  const bool to_device = destination.place == Place::kDevice;
  const bool from_device = source.place == Place::kDevice;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
    default:
      return false;
  }
}

struct Copy {
  void* destination = nullptr;
  const void* source = nullptr;
  std::size_t bytes = 0;
  cudaMemcpyKind kind = cudaMemcpyDefault;
};

/// Results of at most this size are zeros for the host under the virtual clock; larger ones are not written.
constexpr std::size_t kZeroed = 65536;

Task task_of(const Copy& copy, const Side& destination, const Side& source) {
  const Speeds& speeds = VirtualClock::get().speeds();
  const auto bytes = static_cast<double>(copy.bytes);
  const bool to_device = destination.place == Place::kDevice;
  const bool from_device = source.place == Place::kDevice;
  if (to_device && from_device) {
    return Task::of({.bytes = 2 * bytes});
  }
  if (to_device || from_device) {
    const double rate = to_device ? speeds.to_device : speeds.to_host;
    return {.unit = to_device ? Unit::kToDevice : Unit::kToHost, .seconds = speeds.operation_seconds + bytes / rate};
  }
  return {.unit = Unit::kHostMemory, .seconds = 2 * bytes / speeds.host_memory};
}

/// The copy under the virtual clock: it takes its time, and moves nothing.
cudaError_t enqueue_in_time(Stream& stream, const Copy& copy, const Task& task, bool waits) {
  const PointPtr end = stream.push({}, task);
  if (task.unit == Unit::kToHost && copy.bytes <= kZeroed) {
    std::memset(copy.destination, 0, copy.bytes);
  }
  if (waits) {
    end->wait();
  }
  return cudaSuccess;
}

/// Enqueues a copy. With `finish`, waits for it too, as cudaMemcpy does where pinned memory is a side of it.
cudaError_t enqueue(Stream& stream, const Copy& copy, bool finish) {
  if (copy.bytes == 0) {
    return cudaSuccess;
  }
  Side destination;
  Side source;
  if (!locate(copy.destination, copy.bytes, stream.device(), destination) ||
      !locate(copy.source, copy.bytes, stream.device(), source) || !fits(copy.kind, destination, source)) {
    return cudaErrorInvalidValue;
  }
  const bool between_hosts = destination.place != Place::kDevice && source.place != Place::kDevice;
  const bool between_devices = destination.place == Place::kDevice && source.place == Place::kDevice;
  const bool waits = destination.place == Place::kPageable || between_hosts ||
                     (finish && !between_devices && source.place != Place::kPageable);
  if (waits && in_stream_thread()) {
    return cudaErrorNotPermitted;  // it might wait for itself
  }
  if (VirtualClock::get().runs()) {
    return enqueue_in_time(stream, copy, task_of(copy, destination, source), waits);
  }
  const void* from = copy.source;
  if (source.place == Place::kPageable) {
    const auto read = std::make_shared_for_overwrite<std::byte[]>(copy.bytes);
    std::memcpy(read.get(), copy.source, copy.bytes);
    from = read.get();
    source.kept = read;
  }
  const PointPtr end = stream.push([to = copy.destination, from, bytes = copy.bytes, first = std::move(source.kept),
                                    second = std::move(destination.kept)] { std::memcpy(to, from, bytes); });
  if (waits) {
    end->wait();
  }
  return cudaSuccess;
}

cudaError_t fill(cudaStream_t stream, void* pointer, int value, std::size_t bytes) {
  return with_stream(stream, [&](Stream& known) {
    if (bytes == 0) {
      return cudaSuccess;
    }
    const int device = device_of(pointer);
    if (device < 0 || !Machine::get().device(device).memory.holds(pointer, bytes)) {
      return cudaErrorInvalidValue;
    }
    known.push([=] { std::memset(pointer, value, bytes); }, Task::of({.bytes = static_cast<double>(bytes)}));
    return cudaSuccess;
  });
}

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaMemcpyAsync(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind kind,
                                      cudaStream_t stream) {
  return call("cudaMemcpyAsync", kUsesDevice, [&] {
    return with_stream(stream, [&](Stream& known) {
      return enqueue(known, {.destination = destination, .source = source, .bytes = bytes, .kind = kind},
                     /*finish=*/false);
    });
  });
}

cudaError_t CUDARTAPI cudaMemcpy(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind kind) {
  return call("cudaMemcpy", kUsesDevice, [&] {
    return with_stream(nullptr, [&](Stream& known) {
      return enqueue(known, {.destination = destination, .source = source, .bytes = bytes, .kind = kind},
                     /*finish=*/true);
    });
  });
}

cudaError_t CUDARTAPI cudaMemcpyPeerAsync(void* destination, int to, const void* source, int from, std::size_t bytes,
                                          cudaStream_t stream) {
  return call("cudaMemcpyPeerAsync", kUsesDevice, [&] {
    const Machine& machine = Machine::get();
    if (!machine.has_device(to) || !machine.has_device(from)) {
      return cudaErrorInvalidDevice;
    }
    if (device_of(destination) != to || device_of(source) != from) {
      return cudaErrorInvalidValue;
    }
    return with_stream(stream, [&](Stream& known) {
      return enqueue(known,
                     {.destination = destination, .source = source, .bytes = bytes, .kind = cudaMemcpyDeviceToDevice},
                     /*finish=*/false);
    });
  });
}

cudaError_t CUDARTAPI cudaMemsetAsync(void* pointer, int value, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync", kUsesDevice, [&] { return fill(stream, pointer, value, bytes); });
}

cudaError_t CUDARTAPI cudaMemset(void* pointer, int value, std::size_t bytes) {
  return call("cudaMemset", kUsesDevice, [&] { return fill(nullptr, pointer, value, bytes); });
}

}  // extern "C"
