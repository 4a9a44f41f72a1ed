#include "csrc/pytorch/model/overwritten_log.h"

#include <ATen/ThreadLocalPythonObjects.h>

#include <atomic>
#include <utility>

#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/parameters/watched_hosts.h"

namespace hydra {

namespace {

using at::impl::ThreadLocalPythonObjects;

std::string next_mark() {
  static std::atomic<std::uint64_t> made{0};
  return "hydra_ext.step." + std::to_string(++made);
}

}  // namespace

OverwrittenLog::OverwrittenLog(std::weak_ptr<PagedModel> owner, bool is_own)
    : owner_(std::move(owner)), is_own_(is_own), mark_(next_mark()) {
  ThreadLocalPythonObjects::set(mark_, nullptr);
}

OverwrittenLog::~OverwrittenLog() {
  if (ThreadLocalPythonObjects::contains(mark_)) {
    ThreadLocalPythonObjects::erase(mark_);
  }
  for (const auto& [parameter, watch] : watches_) {
    watched_hosts::remove(watch.host, parameter, storage_of(watch));
  }
}

void OverwrittenLog::watch(HostParameter& parameter, at::Tensor present) {
  watched_hosts::add(owner_, parameter);
  watches_.insert_or_assign(&parameter,
                            Watch{parameter.host, std::move(present), parameter.host.storage().getWeakStorageImpl()});
}

std::vector<Overwritten> OverwrittenLog::take() {
  find_replaced();
  const std::lock_guard lock(mutex_);
  std::vector<Overwritten> taken;
  for (auto& [parameter, overwritten] : std::exchange(kept_, {})) {
    taken.push_back(std::move(overwritten));
  }
  return taken;
}

void OverwrittenLog::find_replaced() {
  const std::shared_ptr<PagedModel> owner = owner_.lock();
  if (!owner || is_elsewhere()) {
    return;
  }
  for (auto& [parameter, watch] : watches_) {
    const c10::StorageImpl* const storage = storage_of(watch);
    if (watch.host.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() != storage) {
      add(*parameter, watch.present);
      watched_hosts::remove(watch.host, parameter, storage);
      this->watch(*parameter, watch.host.variable_data());
    }
  }
}

bool OverwrittenLog::concerns_this_thread() const { return is_own_ || ThreadLocalPythonObjects::contains(mark_); }

bool OverwrittenLog::has(const HostParameter& parameter) const {
  const std::lock_guard lock(mutex_);
  return kept_.contains(&parameter);
}

void OverwrittenLog::add(const HostParameter& parameter, const at::Tensor& before) {
  const std::lock_guard lock(mutex_);
  kept_.try_emplace(&parameter, Overwritten{parameter.name, parameter.host, before});
}

void OverwrittenLog::note_entry() {
  const bool here = concerns_this_thread();
  const std::lock_guard lock(mutex_);
  (here ? entered_here_ : entered_elsewhere_) = true;
}

bool OverwrittenLog::is_elsewhere() const {
  const std::lock_guard lock(mutex_);
  return entered_elsewhere_ && !entered_here_;
}

}  // namespace hydra
