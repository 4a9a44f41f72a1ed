#include "csrc/pytorch/parameters/watched_hosts.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "csrc/pytorch/parameters/fault_key.h"
#include "csrc/pytorch/parameters/withheld.h"

namespace hydra::watched_hosts {
namespace {

struct Entry {
  std::weak_ptr<PagedModel> owner;
  HostParameter* parameter = nullptr;
  int logs = 0;
};

struct Watched {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::vector<Entry>> by_storage;
};

/// Never destroyed, on purpose: logs may outlive statics.
Watched& all() {
  static auto* const watched = std::make_unique<Watched>().release();
  return *watched;
}

}  // namespace

void add(const std::weak_ptr<PagedModel>& owner, HostParameter& parameter) {
  c10::TensorImpl* const host = parameter.host.unsafeGetTensorImpl();
  Watched& watched = all();
  const std::lock_guard lock(watched.mutex);
  auto& entries = watched.by_storage[host->unsafe_storage().unsafeGetStorageImpl()];
  const auto same = [&](const Entry& entry) { return entry.parameter == &parameter; };
  auto entry = std::find_if(entries.begin(), entries.end(), same);
  if (entry == entries.end()) {
    entry = entries.insert(entry, Entry{owner, &parameter});
  }
  ++entry->logs;
  add_fault_key(*host);
}

void remove(const at::Tensor& host, const HostParameter* parameter, const c10::StorageImpl* storage) noexcept {
  {
    Watched& watched = all();
    const std::lock_guard lock(watched.mutex);
    const auto found = watched.by_storage.find(storage);
    if (found == watched.by_storage.end()) {
      return;
    }
    std::erase_if(found->second, [&](Entry& entry) { return entry.parameter == parameter && --entry.logs == 0; });
    if (found->second.empty()) {
      watched.by_storage.erase(found);
    }
  }
  // In this order: a give_back() that found it watched has left the key, and has returned the bytes before.
  const bool shown = host.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage;
  if (shown && !includes(storage) && !withheld_of(host)) {
    remove_fault_key(*host.unsafeGetTensorImpl());
  }
}

bool includes(const c10::StorageImpl* storage) noexcept {
  Watched& watched = all();
  const std::lock_guard lock(watched.mutex);
  return watched.by_storage.contains(storage);
}

std::vector<Found> with_storage_of(const at::Tensor& tensor) {
  std::vector<Found> found;
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return found;
  }
  Watched& watched = all();
  const std::lock_guard lock(watched.mutex);
  const auto entries = watched.by_storage.find(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (entries != watched.by_storage.end()) {
    for (const Entry& entry : entries->second) {
      if (std::shared_ptr<PagedModel> owner = entry.owner.lock()) {
        found.emplace_back(std::move(owner), entry.parameter);
      }
    }
  }
  return found;
}

}  // namespace hydra::watched_hosts
