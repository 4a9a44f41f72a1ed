#include "tests/cpp/cuda/fake_cuda_runtime.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>

namespace {

using Clock = std::chrono::steady_clock;

/// One recording of an event.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point when;

  void reach() {
    const std::lock_guard lock(mutex);
    done = true;
    when = Clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
};

struct State {
  std::mutex mutex;
  std::mt19937_64 random;
  double longest_delay = 0.0;
  std::map<std::string, std::pair<int, cudaError_t>> failures;
  std::set<const void*> capturing;
  std::set<const void*> registered;
  std::atomic<int> streams{0};
  std::atomic<int> events{0};
  std::atomic<bool> wrong_device{false};
};

State& state() {
  static State instance;
  return instance;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) { return last_error = error; }

/// The scripted failure of `call`, if it is due.
cudaError_t scripted(const char* call) {
  State& known = state();
  const std::lock_guard lock(known.mutex);
  const auto found = known.failures.find(call);
  if (found == known.failures.end() || found->second.first-- > 0) {
    return cudaSuccess;
  }
  const cudaError_t error = found->second.second;
  known.failures.erase(found);
  return failed(error);
}

Clock::duration next_delay() {
  State& known = state();
  const std::lock_guard lock(known.mutex);
  std::uniform_real_distribution<double> seconds(0.0, known.longest_delay);
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds(known.random)));
}

}  // namespace

struct CUstream_st {
  explicit CUstream_st(int on_device) : device(on_device), thread([this] { run(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
      changed.notify_all();
    }
    thread.join();
  }

  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex);
    queue.push_back([delay = next_delay(), work = std::move(work)] {
      std::this_thread::sleep_for(delay);
      work();
    });
    changed.notify_all();
  }

  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return stopping || !queue.empty(); });
        if (queue.empty()) {
          return;
        }
        work = std::move(queue.front());
        queue.pop_front();
      }
      work();
    }
  }

  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool stopping = false;
  std::thread thread;
};

struct CUevent_st {
  explicit CUevent_st(int on_device) : device(on_device) {}
  const int device;
  std::mutex mutex;
  std::shared_ptr<Point> point;

  std::shared_ptr<Point> latest() {
    const std::lock_guard lock(mutex);
    return point;
  }
};

namespace {

/// The handle of the default stream means that of the current device.
cudaStream_t resolve(cudaStream_t stream) {
  static CUstream_st first(0);
  static CUstream_st second(1);
  if (stream == nullptr) {
    return current_device == 0 ? &first : &second;
  }
  if (stream->device != current_device) {
    state().wrong_device = true;
  }
  return stream;
}

}  // namespace

namespace fake_cuda {

void launch(cudaStream_t stream, std::function<void()> kernel) { resolve(stream)->push(std::move(kernel)); }

void set_delays(double longest_seconds, std::uint64_t seed) {
  const std::lock_guard lock(state().mutex);
  state().longest_delay = longest_seconds;
  state().random.seed(seed);
}

void fail(const std::string& call, cudaError_t error, int successes) {
  const std::lock_guard lock(state().mutex);
  state().failures[call] = {successes, error};
}

void set_capturing(cudaStream_t stream, bool capturing) {
  const std::lock_guard lock(state().mutex);
  capturing ? static_cast<void>(state().capturing.insert(stream)) : static_cast<void>(state().capturing.erase(stream));
}

int streams() { return state().streams; }
int events() { return state().events; }
int registrations() {
  const std::lock_guard lock(state().mutex);
  return static_cast<int>(state().registered.size());
}
bool wrong_device() { return state().wrong_device; }

void reset() {
  const std::lock_guard lock(state().mutex);
  state().longest_delay = 0.0;
  state().failures.clear();
  state().capturing.clear();
  state().wrong_device = false;
}

}  // namespace fake_cuda

// ---- the runtime's own calls ------------------------------------------------------------------
extern "C" {

cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* CUDARTAPI cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheFake";
}

const char* CUDARTAPI cudaGetErrorString(cudaError_t /*error*/) { return "scripted"; }

cudaError_t CUDARTAPI cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = std::size_t{1} << 30;
  *total = std::size_t{1} << 31;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaMalloc(void** pointer, std::size_t bytes) {
  if (const cudaError_t error = scripted("cudaMalloc"); error != cudaSuccess) {
    return error;
  }
  *pointer = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  return *pointer == nullptr ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t CUDARTAPI cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaHostRegister(void* pointer, std::size_t /*bytes*/, unsigned /*flags*/) {
  if (const cudaError_t error = scripted("cudaHostRegister"); error != cudaSuccess) {
    return error;
  }
  const std::lock_guard lock(state().mutex);
  return state().registered.insert(pointer).second ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t CUDARTAPI cudaHostUnregister(void* pointer) {
  const std::lock_guard lock(state().mutex);
  return state().registered.erase(pointer) == 1 ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = new CUstream_st(current_device);
  ++state().streams;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  --state().streams;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  const auto point = std::make_shared<Point>();
  resolve(stream)->push([point] { point->reach(); });
  point->wait();
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(state().mutex);
  *status = state().capturing.contains(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  if (const cudaError_t error = scripted("cudaStreamWaitEvent"); error != cudaSuccess) {
    return error;
  }
  if (const auto point = event->latest()) {
    resolve(stream)->push([point] { point->wait(); });
  }
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  if (const cudaError_t error = scripted("cudaEventCreateWithFlags"); error != cudaSuccess) {
    return error;
  }
  *event = new CUevent_st(current_device);
  ++state().events;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  delete event;
  --state().events;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t error = scripted("cudaEventRecord"); error != cudaSuccess) {
    return error;
  }
  cudaStream_t const where = resolve(stream);
  if (where->device != event->device) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  const auto point = std::make_shared<Point>();
  {
    const std::lock_guard lock(event->mutex);
    event->point = point;
  }
  where->push([point] { point->reach(); });
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  const auto point = event->latest();
  if (!point) {
    return cudaSuccess;
  }
  const std::lock_guard lock(point->mutex);
  return point->done ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  if (const auto point = event->latest()) {
    point->wait();
  }
  return scripted("cudaEventSynchronize");
}

cudaError_t CUDARTAPI cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const auto seconds = std::chrono::duration<float>(end->latest()->when - start->latest()->when);
  *milliseconds = seconds.count() * 1e3F;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaMemcpyAsync(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind /*kind*/,
                                      cudaStream_t stream) {
  if (const cudaError_t error = scripted("cudaMemcpyAsync"); error != cudaSuccess) {
    return error;
  }
  resolve(stream)->push([=] { std::memcpy(destination, source, bytes); });
  return cudaSuccess;
}

}  // extern "C"
