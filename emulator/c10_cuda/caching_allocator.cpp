// c10/cuda/CUDACachingAllocator.h and CUDAAllocatorConfig.h on models of the devices' caches.
//
// The allocator is installed when the library is loaded, under the name "native", and is never destroyed. It needs
// init() before its first allocation, as torch's does. What it lacks throws an error that says so.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulator/c10_cuda/device_cache.h"
#include "emulator/cudart/control.h"

namespace c10 {

C10_DEFINE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback);

namespace cuda::CUDACachingAllocator {

namespace {

using CachingAllocator::AcceleratorAllocatorConfig;
using emulated_cuda::CacheCounters;
using emulated_cuda::CacheExhausted;
using emulated_cuda::CacheSegment;
using emulated_cuda::CacheStats;
using emulated_cuda::DeviceCache;

constexpr std::size_t kExbibyte = std::size_t{1} << 60;

[[noreturn]] void refuse(const char* what) { TORCH_CHECK(false, "the emulated allocator has no ", what); }

void refuse_unless(bool usual, const char* what) { TORCH_CHECK(usual, "the emulated allocator has no ", what); }

/// Runs the callbacks that programs have registered: each, whatever the others free.
bool run_callbacks() {
  bool freed = false;
  for (const std::string& name : FreeCudaMemoryCallbacksRegistry()->Keys()) {
    freed |= FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
  }
  return freed;
}

/// Calls the model, and turns its errors into torch's.
template <class Call>
auto translated(const Call& call) {
  try {
    return call();
  } catch (const CacheExhausted& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const emulated_cuda::runtime::CudaFailure& error) {
    C10_CUDA_CHECK(error.status());
    throw;
  } catch (const std::invalid_argument&) {
    TORCH_CHECK(false, "invalid device pointer");
  }
}

void copy_counters(const CacheCounters& from, CachingAllocator::StatArray& to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    to[i].current = from[i].current;
    to[i].peak = from[i].peak;
    to[i].allocated = from[i].added;
    to[i].freed = from[i].removed;
  }
}

DeviceStats torch_stats(const CacheStats& from) {
  DeviceStats stats;
  copy_counters(from.allocations, stats.allocation);
  copy_counters(from.segments, stats.segment);
  copy_counters(from.active_blocks, stats.active);
  copy_counters(from.allocated_bytes, stats.allocated_bytes);
  copy_counters(from.reserved_bytes, stats.reserved_bytes);
  copy_counters(from.active_bytes, stats.active_bytes);
  copy_counters(from.requested_bytes, stats.requested_bytes);
  stats.num_alloc_retries = from.retries;
  stats.num_ooms = from.failures;
  stats.num_sync_all_streams = from.waits;
  stats.num_device_alloc = from.device_allocations;
  stats.num_device_free = from.device_frees;
  stats.max_split_size = static_cast<std::int64_t>(AcceleratorAllocatorConfig::max_split_size());
  return stats;
}

SegmentInfo torch_segment(DeviceIndex device, const CacheSegment& from) {
  SegmentInfo segment;
  segment.device = device;
  segment.address = reinterpret_cast<std::size_t>(from.blocks.front().address);
  segment.stream = from.stream;
  segment.is_large = !from.small;
  segment.is_expandable = from.expandable;
  for (const emulated_cuda::CacheBlock& known : from.blocks) {
    BlockInfo block;
    block.size = known.bytes;
    block.requested_size = known.requested;
    block.allocated = known.allocated;
    block.active = known.active;
    segment.total_size += block.size;
    segment.allocated_size += block.allocated ? block.size : 0;
    segment.active_size += block.active ? block.size : 0;
    segment.requested_size += block.active ? block.requested_size : 0;
    segment.blocks.push_back(std::move(block));
  }
  return segment;
}

AllocatorConfigInfo settings() {
  AllocatorConfigInfo info{};
  info.max_split_size = AcceleratorAllocatorConfig::max_split_size();
  info.expandable_segments = AcceleratorAllocatorConfig::use_expandable_segments();
  info.last_allocator_settings = AcceleratorAllocatorConfig::last_allocator_settings();
  info.roundup_power2_divisions = AcceleratorAllocatorConfig::roundup_power2_divisions();
  return info;
}

class EmulatedAllocator final : public CUDAAllocator {
 public:
  using CUDAAllocator::recordStream;

  // ---- life ----
  std::string name() override { return "native"; }
  bool initialized() override { return !caches_.empty(); }
  void init(int device_count) override {
    static_cast<void>(CUDAAllocatorConfig::instance());  // an unknown setting is an error now
    for (auto device = static_cast<int>(caches_.size()); device < device_count; ++device) {
      caches_.push_back(std::make_unique<DeviceCache>(
          device, emulated_cuda::CacheHooks{.on_miss = &run_callbacks,
                                            .expandable = &AcceleratorAllocatorConfig::use_expandable_segments}));
    }
  }
  void enable(bool value) override { refuse_unless(value, "way to be switched off"); }
  bool isEnabled() const override { return true; }

  // ---- allocation ----
  DataPtr allocate(std::size_t size) override {
    TORCH_CHECK_WITH(OutOfMemoryError, size < kExbibyte, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    const DeviceIndex device = current_device();
    void* const memory = size == 0 ? nullptr : on(device, size, getCurrentCUDAStream(device).stream());
    return {memory, memory, &free_allocation, Device(DeviceType::CUDA, device)};
  }
  DeleterFnPtr raw_deleter() const override { return &free_allocation; }
  void* raw_alloc(std::size_t nbytes) override {
    return nbytes == 0 ? nullptr : on(current_device(), nbytes, getCurrentCUDAStream().stream());
  }
  void* raw_alloc_with_stream(std::size_t nbytes, cudaStream_t stream) override {
    return nbytes == 0 ? nullptr : on(current_device(), nbytes, stream);
  }
  void raw_delete(void* ptr) override { free_allocation(ptr); }
  void recordStream(const DataPtr& ptr, CUDAStream stream) override {
    // Memory that came from elsewhere, torch ignores.
    if (ptr.get() != nullptr && ptr.get_deleter() == &free_allocation) {
      translated([&] { cache_of(ptr.get()).record_stream(ptr.get(), stream.device_index(), stream.stream()); });
    }
  }
  void emptyCache(MempoolId_t mempool_id) override {
    refuse_unless(mempool_id == MempoolId_t{0, 0}, "private pools");
    for (const auto& cache : caches_) {
      translated([&] { cache->release_cached(); });
    }
  }

  // ---- limits and figures ----
  double getMemoryFraction(DeviceIndex device) override {
    DeviceCache& known = cache(device);
    set_device(device);  // torch leaves it current
    return translated([&] { return known.memory_fraction(); });
  }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    DeviceCache& known = cache(device);
    TORCH_CHECK(fraction >= 0 && fraction <= 1, "a memory fraction lies in [0, 1]: ", fraction);
    set_device(device);  // torch leaves it current
    translated([&] { known.set_memory_fraction(fraction); });
  }
  DeviceStats getDeviceStats(DeviceIndex device) override { return torch_stats(cache(device).stats()); }
  void resetAccumulatedStats(DeviceIndex device) override { cache(device).reset_totals(); }
  void resetPeakStats(DeviceIndex device) override { cache(device).reset_peaks(); }
  void cacheInfo(DeviceIndex device, std::size_t* largestBlock) override {
    if (*largestBlock == 0) {
      *largestBlock = getMemoryInfo(device).first;
    }
    *largestBlock = std::max(*largestBlock, cache(device).largest_free());
  }
  SnapshotInfo snapshot(MempoolId_t mempool_id, bool /*include_traces*/) override {
    refuse_unless(mempool_id == MempoolId_t{0, 0}, "private pools");
    SnapshotInfo all;
    for (std::size_t device = 0; device < caches_.size(); ++device) {
      for (const CacheSegment& segment : caches_[device]->snapshot()) {
        all.segments.push_back(torch_segment(static_cast<DeviceIndex>(device), segment));
      }
    }
    all.device_traces.resize(caches_.size());
    all.config_metadata = settings();
    return all;
  }

  // ---- copies ----
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    C10_CUDA_CHECK(cudaMemcpy(dest, src, count, cudaMemcpyDeviceToDevice));
  }
  cudaError_t memcpyAsync(void* dst, int /*dstDevice*/, const void* src, int /*srcDevice*/, std::size_t count,
                          cudaStream_t stream, bool /*p2p_enabled*/) override {
    return cudaMemcpyAsync(dst, src, count, cudaMemcpyDeviceToDevice, stream);
  }
  void enablePeerAccess(DeviceIndex, DeviceIndex) override {}  // emulated devices reach each other's memory

  // ---- what it lacks ----
  bool isHistoryEnabled() override { return false; }
  void recordHistory(bool enabled, CreateContextFn, std::size_t, RecordContext, bool,
                     const std::vector<std::string>&) override {
    refuse_unless(!enabled, "history");
  }
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex) override { refuse("sizes of segments"); }
  void* getBaseAllocation(void*, std::size_t*) override { refuse("bases of allocations"); }
  void beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) override {
    refuse("private pools");
  }
  void endAllocateToPool(DeviceIndex, MempoolId_t) override { refuse("private pools"); }
  void releasePool(DeviceIndex, MempoolId_t) override { refuse("private pools"); }
  ShareableHandle shareIpcHandle(void*) override { refuse("handles for other processes"); }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { refuse("handles for other processes"); }
  void attachOutOfMemoryObserver(OutOfMemoryObserver) override { refuse("observers"); }
  void attachOomRejectionObserver(OomRejectionObserver) override { refuse("observers"); }
  void attachAllocatorTraceTracker(AllocatorTraceTracker) override { refuse("traces"); }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex, MempoolId_t) override { refuse("checkpoints"); }
  CheckpointDelta setCheckpointPoolState(DeviceIndex, std::shared_ptr<AllocatorState>) override {
    refuse("checkpoints");
  }

 private:
  static void free_allocation(void* memory);

  DeviceCache& cache(DeviceIndex device) const {
    TORCH_CHECK(device >= 0 && static_cast<std::size_t>(device) < caches_.size(), "Invalid device argument ",
                static_cast<int>(device), ": did you call init?");
    return *caches_[static_cast<std::size_t>(device)];
  }
  /// The cache of the device whose memory this is.
  DeviceCache& cache_of(const void* memory) const {
    const int device = emulated_cuda::device_of(memory);
    TORCH_CHECK(device >= 0, "invalid device pointer: ", memory);
    return cache(static_cast<DeviceIndex>(device));
  }
  /// Allocates on the device, which is the current one.
  void* on(DeviceIndex device, std::size_t bytes, cudaStream_t stream) const {
    DeviceCache& known = cache(device);
    return translated([&] { return known.allocate(bytes, stream); });
  }

  std::vector<std::unique_ptr<DeviceCache>> caches_;
};

EmulatedAllocator& instance() {
  static auto* const made = std::make_unique<EmulatedAllocator>().release();
  return *made;
}

void EmulatedAllocator::free_allocation(void* memory) {
  // A stream's thread must not wait for the cache, which may wait for the stream.
  TORCH_INTERNAL_ASSERT(!emulated_cuda::on_stream_thread(), "the work of a stream owned memory of the device");
  if (memory != nullptr) {
    translated([&] { instance().cache_of(memory).free(memory); });
  }
}

}  // namespace

std::atomic<CUDAAllocator*> allocator;

namespace {

const bool installed = [] {
  allocator.store(&instance());
  SetAllocator(DeviceType::CUDA, &instance());
  return true;
}();

}  // namespace

void CUDAAllocatorConfig::parseArgs(const std::string& env) {
  const CachingAllocator::ConfigTokenizer tokens(env);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string& key = tokens[i];
    const std::size_t value = tokens.skipKey(i);
    const bool known = key == "expandable_segments" || (key == "backend" && tokens[value] == "native");
    TORCH_CHECK_VALUE(known, "the emulated allocator has no setting ", key, ":", tokens[value]);
    i = value + 1;  // a comma, or the end
  }
}

REGISTER_ALLOCATOR_CONFIG_PARSE_HOOK(CUDAAllocatorConfig)

}  // namespace cuda::CUDACachingAllocator

}  // namespace c10
