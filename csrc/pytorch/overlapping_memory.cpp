#include "csrc/pytorch/overlapping_memory.h"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace hydra::overlapping_memory {
namespace {

std::mutex mutex;
std::unordered_map<const void*, std::vector<HostExtent>> extents_of;

}  // namespace

std::vector<HostExtent> exchange(const void* model, std::vector<HostExtent> extents) {
  const std::lock_guard lock(mutex);
  if (extents.empty()) {
    extents_of.erase(model);
    return {};
  }
  std::vector<HostExtent> others;
  for (const auto& [other, noted] : extents_of) {
    if (other != model) {
      others.insert(others.end(), noted.begin(), noted.end());
    }
  }
  extents_of[model] = std::move(extents);
  return others;
}

void forget(const void* model) noexcept {
  const std::lock_guard lock(mutex);
  extents_of.erase(model);
}

}  // namespace hydra::overlapping_memory
