#include "csrc/pytorch/cuda/cuda_relief.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ScopeExit.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "csrc/base/device_turns.h"
#include "csrc/memory/out_of_memory.h"
#include "csrc/pytorch/threads/gil.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr Bytes kUnit = 512;  // torch's allocator rounds sizes up to multiples of it

thread_local int pauses = 0;
thread_local bool relieving = false;  // inside make_room(), under the lock

bool capturing() noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status);
  forget_cuda_error(result);
  return result != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

/// An allocator that passes every call on to another one.
class ForwardingAllocator : public allocator::CUDAAllocator {
 public:
  using CUDAAllocator = allocator::CUDAAllocator;
  using Index = c10::DeviceIndex;
  using CUDAAllocator::recordStream;

  /// `inner` has to outlive it.
  explicit ForwardingAllocator(CUDAAllocator& inner) : inner_(inner) {}

  // ---- c10::Allocator ----
  c10::DataPtr allocate(std::size_t size) override { return inner_.allocate(size); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return inner_.is_simple_data_ptr(data); }
  c10::DeleterFnPtr raw_deleter() const override { return inner_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t count) const override { inner_.copy_data(to, from, count); }

  // ---- c10::DeviceAllocator ----
  bool initialized() override { return inner_.initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { inner_.emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Index device) override {
    return inner_.getDeviceStats(device);
  }
  void resetAccumulatedStats(Index device) override { inner_.resetAccumulatedStats(device); }
  void resetPeakStats(Index device) override { inner_.resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(Index device) override { return inner_.getMemoryInfo(device); }

  // ---- memory ----
  void* raw_alloc(std::size_t size) override { return inner_.raw_alloc(size); }
  void* raw_alloc_with_stream(std::size_t size, cudaStream_t stream) override {
    return inner_.raw_alloc_with_stream(size, stream);
  }
  void raw_delete(void* pointer) override { inner_.raw_delete(pointer); }
  c10::DataPtr allocateWithAddress(std::size_t size, void* address) override {
    return inner_.allocateWithAddress(size, address);
  }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    inner_.recordStream(data, stream);
  }
  void* getBaseAllocation(void* pointer, std::size_t* size) override { return inner_.getBaseAllocation(pointer, size); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t count,
                          cudaStream_t stream, bool peers) override {
    return inner_.memcpyAsync(to, to_device, from, from_device, count, stream, peers);
  }
  void enablePeerAccess(Index device, Index peer) override { inner_.enablePeerAccess(device, peer); }
  allocator::ShareableHandle shareIpcHandle(void* pointer) override { return inner_.shareIpcHandle(pointer); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return inner_.getIpcDevPtr(std::move(handle)); }

  // ---- settings and figures ----
  std::string name() override { return inner_.name(); }
  void init(int devices) override { inner_.init(devices); }
  void enable(bool value) override { inner_.enable(value); }
  bool isEnabled() const override { return inner_.isEnabled(); }
  double getMemoryFraction(Index device) override { return inner_.getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Index device) override { inner_.setMemoryFraction(fraction, device); }
  std::vector<allocator::StreamSegmentSize> getExpandableSegmentSizes(Index device) override {
    return inner_.getExpandableSegmentSizes(device);
  }
  void cacheInfo(Index device, std::size_t* largest) override { inner_.cacheInfo(device, largest); }
  allocator::SnapshotInfo snapshot(c10::MempoolId_t pool, bool traces) override {
    return inner_.snapshot(pool, traces);
  }

  // ---- private pools ----
  void beginAllocateToPool(Index device, c10::MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    inner_.beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Index device, c10::MempoolId_t pool) override { inner_.endAllocateToPool(device, pool); }
  void releasePool(Index device, c10::MempoolId_t pool) override { inner_.releasePool(device, pool); }
  int getPoolUseCount(Index device, c10::MempoolId_t pool) override { return inner_.getPoolUseCount(device, pool); }
  void createOrIncrefPool(Index device, c10::MempoolId_t pool, std::shared_ptr<CUDAAllocator> allocator) override {
    inner_.createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(Index device, c10::MempoolId_t pool, bool use) override { inner_.setUseOnOOM(device, pool, use); }
  void setNoSplit(Index device, c10::MempoolId_t pool) override { inner_.setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(Index device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return inner_.checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<allocator::AllocatorState> getCheckpointState(Index device, c10::MempoolId_t pool) override {
    return inner_.getCheckpointState(device, pool);
  }
  allocator::CheckpointDelta setCheckpointPoolState(Index device,
                                                    std::shared_ptr<allocator::AllocatorState> state) override {
    return inner_.setCheckpointPoolState(device, std::move(state));
  }

  // ---- history and observers ----
  bool isHistoryEnabled() override { return inner_.isHistoryEnabled(); }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return inner_.getContextForPointer(pointer);
  }
  void recordHistory(bool enabled, allocator::CreateContextFn recorder, std::size_t entries,
                     allocator::RecordContext when, bool clear, const std::vector<std::string>& skipped) override {
    inner_.recordHistory(enabled, recorder, entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override {
    inner_.recordAnnotation(values);
  }
  void pushCompileContext(std::string& text) override { inner_.pushCompileContext(text); }
  void popCompileContext() override { inner_.popCompileContext(); }
  void setUserMetadata(const std::string& text) override { inner_.setUserMetadata(text); }
  std::string getUserMetadata() override { return inner_.getUserMetadata(); }
  void attachOutOfMemoryObserver(allocator::OutOfMemoryObserver observer) override {
    inner_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(allocator::AllocatorTraceTracker tracker) override {
    inner_.attachAllocatorTraceTracker(std::move(tracker));
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  void markCaptureBegin(Index device) override { inner_.markCaptureBegin(device); }
  void markCaptureEnd(Index device) override { inner_.markCaptureEnd(device); }
  void attachOomRejectionObserver(allocator::OomRejectionObserver observer) override {
    inner_.attachOomRejectionObserver(std::move(observer));
  }
#endif

 private:
  CUDAAllocator& inner_;
};

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
    const auto lock = relieving ? std::shared_lock<std::shared_mutex>() : shared_lock();
    const Bytes limit = budget(device);
    if (limit == 0) {
      return allocate();
    }
    const Bytes bytes = round_up(static_cast<Bytes>(size), kUnit);
    if (pauses > 0 || capturing()) {
      auto memory = allocate();
      measure(device);
      return memory;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, CudaSlots::rounded(bytes) <= limit, kOutOfMemory, human_bytes(bytes),
                     " asked at once, more than the budget of ", human_bytes(limit), ". ", explanation(device));
    while (stats(device).allocated_bytes[kAll].current + bytes > limit && make_room(device)) {
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
        TORCH_CHECK_WITH(OutOfMemoryError, false, kOutOfMemory, kNothingMore, explanation(device), " torch: ", refusal);
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
    const Undisturbed undisturbed;  // a run that begins or ends in its turn waits for this lock
    relieving = true;
    const auto ended = c10::make_scope_exit([] { relieving = false; });
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
