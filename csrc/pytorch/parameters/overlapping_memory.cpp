#include "csrc/pytorch/parameters/overlapping_memory.h"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace hydra::overlapping_memory {
namespace {

struct Noted {
  std::mutex mutex;
  std::unordered_map<const void*, std::vector<HostExtent>> extents;
};

/// Never destroyed, on purpose: models may outlive statics.
Noted& all() {
  static auto* const noted = std::make_unique<Noted>().release();
  return *noted;
}

}  // namespace

std::vector<HostExtent> exchange(const void* model, std::vector<HostExtent> extents) {
  Noted& noted = all();
  const std::lock_guard lock(noted.mutex);
  if (extents.empty()) {
    noted.extents.erase(model);
    return {};
  }
  std::vector<HostExtent> others;
  for (const auto& [other, its] : noted.extents) {
    if (other != model) {
      others.insert(others.end(), its.begin(), its.end());
    }
  }
  noted.extents[model] = std::move(extents);
  return others;
}

void forget(const void* model) noexcept {
  Noted& noted = all();
  const std::lock_guard lock(noted.mutex);
  noted.extents.erase(model);
}

}  // namespace hydra::overlapping_memory
