#include "csrc/pytorch/memory/cuda_relief.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/out_of_memory.h"
#include "csrc/pytorch/memory/forwarding_allocator.h"
#include "csrc/pytorch/threads/gil.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr Bytes kUnit = 512;  // torch's allocator rounds sizes up to multiples of it

thread_local int pauses = 0;

bool capturing() noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status);
  forget_cuda_error(result);
  return result != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

class RelievingAllocator final : public ForwardingAllocator {
 public:
  explicit RelievingAllocator(CUDAAllocator& inner) : ForwardingAllocator(inner) {}

  c10::DataPtr allocate(std::size_t size) override {
    return relieved(size, [&] { return ForwardingAllocator::allocate(size); });
  }
  void* raw_alloc(std::size_t size) override {
    return relieved(size, [&] { return ForwardingAllocator::raw_alloc(size); });
  }
  void* raw_alloc_with_stream(std::size_t size, cudaStream_t stream) override {
    return relieved(size, [&] { return ForwardingAllocator::raw_alloc_with_stream(size, stream); });
  }

  void add(const CudaRelief& relief) {
    const ReleaseGilIfHeld released;
    const std::unique_lock lock(mutex_);
    served_.push_back(&relief);
    count_ = served_.size();
  }
  void remove(const CudaRelief& relief) noexcept {
    const ReleaseGilIfHeld released;
    const std::unique_lock lock(mutex_);
    std::erase(served_, &relief);
    count_ = served_.size();
  }

 private:
  template <class Allocate>
  auto relieved(std::size_t size, const Allocate& allocate) -> decltype(allocate()) {
    if (count_.load(std::memory_order_relaxed) == 0 || size == 0) {
      return allocate();
    }
    int device = 0;
    if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) {
      forget_cuda_error(status);
      return allocate();  // which raises torch's own error
    }
    const auto lock = shared_lock();
    if (budget(device) == 0) {
      return allocate();
    }
    const Bytes bytes = round_up(static_cast<Bytes>(size), kUnit);
    if (pauses > 0 || capturing()) {
      auto memory = allocate();
      measure(device);
      return memory;
    }
    while (stats(device).allocated_bytes[kAll].current + bytes > budget(device) && make_room(device)) {
    }
    for (;;) {
      std::string refusal;
      try {
        auto memory = allocate();
        measure(device);
        return memory;
      } catch (const c10::OutOfMemoryError& error) {
        refusal = error.what_without_backtrace();
      }
      note_refusal(device, bytes);
      if (!make_room_for(device, bytes)) {
        TORCH_CHECK_WITH(OutOfMemoryError, false, kOutOfMemory, explanation(device), " torch: ", refusal);
      }
    }
  }

  /// A thread that waits for the lock must not keep the interpreter lock from one that has it.
  std::shared_lock<std::shared_mutex> shared_lock() {
    std::shared_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
      const ReleaseGilIfHeld released;
      lock.lock();
    }
    return lock;
  }

  // The callers of these hold the lock.
  c10::CachingDeviceAllocator::DeviceStats stats(int device) {
    return getDeviceStats(static_cast<c10::DeviceIndex>(device));
  }
  template <class Call>
  void each(int device, const Call& call) const {
    for (const CudaRelief* known : served_) {
      if (known->slots().device() == device) {
        call(*known);
      }
    }
  }
  /// The sum of the budgets on the device.
  Bytes budget(int device) const {
    Bytes sum = 0;
    each(device, [&](const CudaRelief& known) { sum += known.client().budget; });
    return sum;
  }
  void measure(int device) {
    const auto now = stats(device);
    each(device, [&](const CudaRelief& known) {
      known.slots().note(now.allocated_bytes[kAll].current, now.reserved_bytes[kAll].current);
    });
  }
  /// torch has released what it could: all that is reserved now is in use, or lies between what is in use.
  void note_refusal(int device, Bytes bytes) {
    const Bytes reserved = stats(device).reserved_bytes[kAll].current;
    each(device, [&](const CudaRelief& known) { known.slots().note_refusal(reserved, bytes); });
  }
  bool make_room(int device) {
    const CudaReliefPause pause;
    const ReleaseGilIfHeld released;
    for (const CudaRelief* known : served_) {
      if (known->slots().device() == device && known->client().make_room()) {
        return true;
      }
    }
    return false;
  }
  /// Frees `bytes`, or what there is. Returns whether anything was freed.
  bool make_room_for(int device, Bytes bytes) {
    const Bytes wanted = stats(device).allocated_bytes[kAll].current - bytes;
    bool any = false;
    while (make_room(device)) {
      any = true;
      if (stats(device).allocated_bytes[kAll].current <= wanted) {
        break;
      }
    }
    return any;
  }

  std::string explanation(int device) const {
    std::string text;
    each(device, [&](const CudaRelief& known) {
      text += text.empty() ? "" : " ";
      text += known.client().explain();
    });
    return text;
  }

  std::shared_mutex mutex_;
  std::vector<const CudaRelief*> served_;
  std::atomic<std::size_t> count_{0};
};

/// Never destroyed, on purpose: storages may call it until the process ends.
RelievingAllocator& installed() {
  static RelievingAllocator* const instance = [] {
    auto made = std::make_unique<RelievingAllocator>(*allocator::get());
    allocator::allocator.store(made.get());
    return made.release();
  }();
  return *instance;
}

}  // namespace

CudaReliefPause::CudaReliefPause() noexcept { ++pauses; }
CudaReliefPause::~CudaReliefPause() { --pauses; }

CudaRelief::CudaRelief(MemoryClient client, CudaSlots& slots) : client_(std::move(client)), slots_(slots) {
  installed().add(*this);
}

CudaRelief::~CudaRelief() { installed().remove(*this); }

}  // namespace hydra
