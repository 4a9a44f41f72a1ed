#include "csrc/pytorch/parameters/update_hold.h"

#include <algorithm>

namespace hydra {

void UpdateHold::take(const std::vector<Share>& shares, const std::weak_ptr<PagedModel>& owner) {
  // Note all parameters before any storage is withheld: a withheld storage no longer gives the addresses of others.
  for (const Share& share : shares) {
    blocks_.insert(share.blocks.begin(), share.blocks.end());
    for (HostParameter* parameter : share.parameters) {
      const c10::Storage& storage = parameter->host.storage();
      if (storage.nbytes() > 0) {
        parameter->note_withheld();
        storages_[storage.unsafeGetStorageImpl()].parameters.push_back(parameter);
      }
    }
  }
  for (const Share& share : shares) {
    take_tensors(share, owner);
  }
}

void UpdateHold::take_tensors(const Share& share, const std::weak_ptr<PagedModel>& owner) {
  for (const at::Tensor& tensor : share.tensors) {
    const c10::Storage& storage = tensor.storage();
    if (storage.nbytes() == 0) {
      continue;
    }
    Held& held = storages_[storage.unsafeGetStorageImpl()];
    if (!held.storage) {
      held.storage = storage;
      held.lent = is_lent(storage);
    }
    const auto same = [&](const at::Tensor& one) { return one.is_same(tensor); };
    if (std::none_of(held.tensors.begin(), held.tensors.end(), same)) {
      withhold(tensor, owner, share.blocks.front());
      held.tensors.push_back(tensor);
    }
    held.users.insert(share.blocks.begin(), share.blocks.end());
    held.waits_for.insert(share.blocks.begin(), share.blocks.end());
    for (const std::int32_t block : share.blocks) {
      used_[block].insert(storage.unsafeGetStorageImpl());
    }
  }
}

std::set<std::int32_t> UpdateHold::users(const c10::Storage& storage) const {
  const auto found = storages_.find(storage.unsafeGetStorageImpl());
  return found == storages_.end() ? std::set<std::int32_t>() : found->second.users;
}

std::set<std::int32_t> UpdateHold::known_elsewhere(const ReferenceCounts& kept) const {
  std::set<std::int32_t> blocks;
  for (const auto& [implementation, held] : storages_) {
    const auto found = kept.find(implementation);
    const std::size_t own = 1 + held.tensors.size() + (found == kept.end() ? 0 : found->second);
    if (held.lent || held.storage.use_count() > own) {
      blocks.insert(held.users.begin(), held.users.end());
    }
  }
  return blocks;
}

void UpdateHold::end(std::int32_t block, Departed& departed) noexcept {
  if (blocks_.erase(block) == 0) {
    return;
  }
  const auto used = used_.extract(block);
  if (used.empty()) {
    return;
  }
  for (const c10::StorageImpl* const implementation : used.mapped()) {
    const auto entry = storages_.find(implementation);
    Held& held = entry->second;
    held.waits_for.erase(block);
    if (!held.waits_for.empty()) {
      continue;
    }
    for (const at::Tensor& tensor : held.tensors) {
      give_back({tensor, held.storage});
    }
    for (HostParameter* parameter : held.parameters) {
      if (parameter->withheld_storage.unsafeGetStorageImpl() == implementation) {
        parameter->withheld() ? parameter->note_came_home() : parameter->note_given_back();
      }
    }
    departed.push_back(std::move(held));
    storages_.erase(entry);
  }
}

}  // namespace hydra
