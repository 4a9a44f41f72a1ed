#include "csrc/pytorch/cuda/expandable_segments.h"

#include <c10/core/AllocatorConfig.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

constexpr const char* kKey = "expandable_segments";
constexpr Bytes kLeastPages = 64;  // of a budget: one page that is in use in one place is little of it

std::string with(const std::string& settings, bool on) {
  return settings + (settings.empty() ? "" : ",") + kKey + (on ? ":True" : ":False");
}

bool is_large(Bytes budget) { return budget >= kLeastPages * ExpandableSegments::kPage; }

struct Settings {
  std::mutex mutex;
  int users = 0;
  std::optional<std::string> before;  // none if nothing was changed
  std::string changed;
};

Settings& settings() {
  static auto* const instance = std::make_unique<Settings>().release();
  return *instance;
}

/// CUDA reports pools of memory where, and only where, it maps memory by pages.
bool every_device_maps_pages() {
  int count = 0;
  HYDRA_CUDA(cudaGetDeviceCount(&count));
  for (int device = 0; device < count; ++device) {
    int supported = 0;
    HYDRA_CUDA(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device));
    if (supported == 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

ExpandableSegments::ExpandableSegments(Bytes budget) : counts_(is_large(budget)) {
  if (!counts_) {
    return;
  }
  Settings& known = settings();
  const std::lock_guard lock(known.mutex);
  if (known.users == 0) {
    const std::string before = c10::CachingAllocator::getAllocatorSettings();
    known.before.reset();
    if (before.find(kKey) == std::string::npos && every_device_maps_pages()) {
      known.changed = with(before, true);
      c10::CachingAllocator::setAllocatorSettings(known.changed);
      known.before = before;
    }
  }
  ++known.users;
}

ExpandableSegments::~ExpandableSegments() {
  if (!counts_) {
    return;
  }
  Settings& known = settings();
  const std::lock_guard lock(known.mutex);
  if (--known.users > 0 || !known.before) {
    return;
  }
  try {
    if (c10::CachingAllocator::getAllocatorSettings() == known.changed) {
      // Text that does not name them leaves them as they are.
      c10::CachingAllocator::setAllocatorSettings(with(*known.before, false));
      c10::CachingAllocator::setAllocatorSettings(*known.before);
    }
  } catch (const std::exception&) {
    // torch has taken these settings before, so this is its end: they no longer matter.
  }
}

Bytes ExpandableSegments::excess(Bytes limit) {
  const bool is_on = c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
  return is_on && is_large(limit) ? kPage : 0;
}

}  // namespace hydra
