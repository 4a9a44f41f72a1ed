#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "emulator/python/bindings.h"
#include "emulator/torch/pinned_memory.h"
#include "emulator/torch/storages.h"
#include "emulator/torch/workspaces.h"

namespace emulated_cuda {

namespace {

namespace py = pybind11;
namespace allocator = c10::cuda::CUDACachingAllocator;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

py::dict dict_of(const Stat& stat) {
  py::dict dict;
  dict["current"] = stat.current;
  dict["peak"] = stat.peak;
  dict["allocated"] = stat.allocated;
  dict["freed"] = stat.freed;
  return dict;
}

py::dict dict_of(const StatArray& stats) {
  constexpr std::array names{"all", "small_pool", "large_pool"};
  py::dict dict;
  for (std::size_t i = 0; i < names.size(); ++i) {
    dict[names[i]] = dict_of(stats[i]);
  }
  return dict;
}

py::dict memory_stats(c10::DeviceIndex device) {
  const auto stats = allocator::getDeviceStats(device);
  py::dict dict;
  dict["num_alloc_retries"] = stats.num_alloc_retries;
  dict["num_ooms"] = stats.num_ooms;
  dict["num_sync_all_streams"] = stats.num_sync_all_streams;
  dict["num_device_alloc"] = stats.num_device_alloc;
  dict["num_device_free"] = stats.num_device_free;
  dict["max_split_size"] = stats.max_split_size;
  dict["allocation"] = dict_of(stats.allocation);
  dict["segment"] = dict_of(stats.segment);
  dict["active"] = dict_of(stats.active);
  dict["inactive_split"] = dict_of(stats.inactive_split);
  dict["allocated_bytes"] = dict_of(stats.allocated_bytes);
  dict["reserved_bytes"] = dict_of(stats.reserved_bytes);
  dict["active_bytes"] = dict_of(stats.active_bytes);
  dict["inactive_split_bytes"] = dict_of(stats.inactive_split_bytes);
  dict["requested_bytes"] = dict_of(stats.requested_bytes);
  dict["oversize_allocations"] = dict_of(stats.oversize_allocations);
  dict["oversize_segments"] = dict_of(stats.oversize_segments);
  return dict;
}

py::dict host_memory_stats() {
  const at::HostStats stats = pinned_allocator().get_stats();
  py::dict dict;
  dict["num_host_alloc"] = stats.num_host_alloc;
  dict["num_host_free"] = stats.num_host_free;
  dict["active_requests"] = dict_of(stats.active_requests);
  dict["active_bytes"] = dict_of(stats.active_bytes);
  dict["allocations"] = dict_of(stats.allocations);
  dict["allocated_bytes"] = dict_of(stats.allocated_bytes);
  return dict;
}

py::list blocks_of(const c10::CachingDeviceAllocator::SegmentInfo& segment) {
  py::list blocks;
  std::size_t address = segment.address;
  for (const auto& block : segment.blocks) {
    py::dict dict;
    dict["address"] = address;
    dict["size"] = block.size;
    dict["requested_size"] = block.requested_size;
    dict["state"] = block.allocated ? "active_allocated" : block.active ? "active_pending_free" : "inactive";
    dict["frames"] = py::list();
    blocks.append(dict);
    address += block.size;
  }
  return blocks;
}

py::list segments() {
  py::list list;
  for (const auto& segment : allocator::snapshot().segments) {
    py::dict dict;
    dict["device"] = segment.device;
    dict["address"] = segment.address;
    dict["total_size"] = segment.total_size;
    dict["allocated_size"] = segment.allocated_size;
    dict["active_size"] = segment.active_size;
    dict["requested_size"] = segment.requested_size;
    dict["stream"] = reinterpret_cast<std::uintptr_t>(segment.stream);
    dict["segment_type"] = segment.is_large ? "large" : "small";
    dict["segment_pool_id"] = std::make_pair(0, 0);
    dict["is_expandable"] = segment.is_expandable;
    dict["frames"] = py::list();
    dict["blocks"] = blocks_of(segment);
    list.append(dict);
  }
  return list;
}

std::pair<std::size_t, std::size_t> free_and_total(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {free, total};
}

/// torch's own function has no case for CUDA in a build without it.
void resize(const at::Tensor& over_storage, std::size_t bytes) {
  resize_storage(*over_storage.storage().unsafeGetStorageImpl(), bytes);
}

}  // namespace

void bind_memory(pybind11::module_& module) {
  module.def("memory_stats", torch::wrap_pybind_function(&memory_stats));
  module.def("host_memory_stats", torch::wrap_pybind_function(&host_memory_stats));
  module.def("segments", torch::wrap_pybind_function(&segments));
  add(module, "reset_peak_memory_stats", [](c10::DeviceIndex device) { allocator::resetPeakStats(device); });
  add(module, "reset_accumulated_memory_stats",
      [](c10::DeviceIndex device) { allocator::resetAccumulatedStats(device); });
  add(module, "reset_peak_host_memory_stats", [] { pinned_allocator().reset_peak_stats(); });
  add(module, "reset_accumulated_host_memory_stats", [] { pinned_allocator().reset_accumulated_stats(); });
  add(module, "memory_fraction", [](c10::DeviceIndex device) { return allocator::getMemoryFraction(device); });
  add(module, "set_memory_fraction",
      [](double fraction, c10::DeviceIndex device) { allocator::setMemoryFraction(fraction, device); });
  add(module, "empty_cache", [] { allocator::emptyCache(); });
  add(module, "empty_host_cache", [] { pinned_allocator().empty_cache(); });
  add(module, "memory_info", &free_and_total);
  add(module, "allocate", [](std::size_t bytes, std::uintptr_t stream) {
    return reinterpret_cast<std::uintptr_t>(
        allocator::raw_alloc_with_stream(bytes, reinterpret_cast<cudaStream_t>(stream)));
  });
  add(module, "free", [](std::uintptr_t address) { allocator::raw_delete(reinterpret_cast<void*>(address)); });
  add(module, "enable_cache", [](bool enabled) { allocator::enable(enabled); });
  add(module, "cache_is_enabled", [] { return allocator::isEnabled(); });
  add(module, "allocator_name", [] { return allocator::name(); });
  add(module, "clear_workspaces", &clear_workspaces);
  add(module, "workspace_bytes", &workspace_bytes);
  add(module, "set_workspace_bytes", &set_workspace_bytes);
  add(module, "reset_workspace_bytes", &reset_workspace_bytes);
  add(module, "resize_storage", &resize);
}

}  // namespace emulated_cuda
