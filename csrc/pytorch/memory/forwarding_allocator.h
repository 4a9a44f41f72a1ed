// torch's interface of a CUDA allocator, with every call passed on to another one: the base of an allocator that
// changes a few of them.
//
// Memory belongs to the other allocator, and its deleters free it. Threads and locks: as of the other allocator.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace hydra {

class ForwardingAllocator : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
 public:
  using CUDAAllocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;
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
  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* pointer) override {
    return inner_.shareIpcHandle(pointer);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return inner_.getIpcDevPtr(std::move(handle)); }

  // ---- settings and figures ----
  std::string name() override { return inner_.name(); }
  void init(int devices) override { inner_.init(devices); }
  void enable(bool value) override { inner_.enable(value); }
  bool isEnabled() const override { return inner_.isEnabled(); }
  double getMemoryFraction(Index device) override { return inner_.getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Index device) override { inner_.setMemoryFraction(fraction, device); }
  std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> getExpandableSegmentSizes(Index device) override {
    return inner_.getExpandableSegmentSizes(device);
  }
  void cacheInfo(Index device, std::size_t* largest) override { inner_.cacheInfo(device, largest); }
  c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(c10::MempoolId_t pool, bool traces) override {
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
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> getCheckpointState(Index device,
                                                                                      c10::MempoolId_t pool) override {
    return inner_.getCheckpointState(device, pool);
  }
  c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
      Index device, std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state) override {
    return inner_.setCheckpointPoolState(device, std::move(state));
  }

  // ---- history and observers ----
  bool isHistoryEnabled() override { return inner_.isHistoryEnabled(); }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return inner_.getContextForPointer(pointer);
  }
  void recordHistory(bool enabled, c10::cuda::CUDACachingAllocator::CreateContextFn recorder, std::size_t entries,
                     c10::cuda::CUDACachingAllocator::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    inner_.recordHistory(enabled, recorder, entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override {
    inner_.recordAnnotation(values);
  }
  void pushCompileContext(std::string& text) override { inner_.pushCompileContext(text); }
  void popCompileContext() override { inner_.popCompileContext(); }
  void setUserMetadata(const std::string& text) override { inner_.setUserMetadata(text); }
  std::string getUserMetadata() override { return inner_.getUserMetadata(); }
  void attachOutOfMemoryObserver(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) override {
    inner_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(c10::cuda::CUDACachingAllocator::AllocatorTraceTracker tracker) override {
    inner_.attachAllocatorTraceTracker(std::move(tracker));
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  void markCaptureBegin(Index device) override { inner_.markCaptureBegin(device); }
  void markCaptureEnd(Index device) override { inner_.markCaptureEnd(device); }
  void attachOomRejectionObserver(c10::cuda::CUDACachingAllocator::OomRejectionObserver observer) override {
    inner_.attachOomRejectionObserver(std::move(observer));
  }
#endif

 private:
  CUDAAllocator& inner_;
};

}  // namespace hydra
