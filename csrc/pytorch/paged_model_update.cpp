// An optimizer step that runs behind the model's back: what it writes is withheld until it is written.
#include "csrc/base/errors.h"
#include "csrc/pytorch/paged_model.h"

namespace hydra {

void PagedModel::defer_update(std::vector<BlockUpdate> updates, std::shared_ptr<ThreadPool> pool, float scale) {
  HYDRA_EXPECT(!closed_ && !window_open(), StateError,
               "an optimizer step during the model's forward or backward, or after its context");
  finish_update();
  std::vector<DeferredUpdate::Part> parts;
  const std::lock_guard lock(update_mutex_);
  for (BlockUpdate& update : updates) {
    for (HostParameter* parameter : backings_[static_cast<std::size_t>(update.block)]->parameters()) {
      parameter->withheld_data = parameter->host_data();
    }
    for (const at::Tensor& tensor : update.tensors) {
      withheld_[update.block].push_back(withhold(tensor, weak_from_this(), update.block));
    }
    parts.push_back({update.block, std::move(update.plan)});
  }
  trainable_stale_ = true;
  ++deferred_updates_;
  update_ = std::make_shared<DeferredUpdate>(std::move(parts), std::move(pool), scale);
  for (const auto& [block, tensors] : withheld_) {
    backings_[static_cast<std::size_t>(block)]->wait_before_fill(update_);
  }
}

std::int64_t PagedModel::deferred_updates() const {
  const std::lock_guard lock(update_mutex_);
  return deferred_updates_;
}

double PagedModel::update_seconds() const {
  const std::lock_guard lock(update_mutex_);
  return update_seconds_ + (update_ ? update_->seconds() : 0.0);
}

void PagedModel::give_back_locked(std::int32_t block) noexcept {
  const auto found = withheld_.find(block);
  if (found == withheld_.end()) {
    return;
  }
  for (const WithheldTensor& withheld : found->second) {
    give_back(withheld);
  }
  withheld_.erase(found);
  BlockBacking& backing = *backings_[static_cast<std::size_t>(block)];
  backing.wait_before_fill(nullptr);
  for (HostParameter* parameter : backing.parameters()) {
    parameter->withheld_data = nullptr;
    parameter->note_seen();  // a slot that has older bytes is stale by trainable_stale_, or has been
  }
}

void PagedModel::finish_update(std::int32_t block) {
  std::shared_ptr<DeferredUpdate> update;
  {
    const std::lock_guard lock(update_mutex_);
    update = update_;
  }
  if (update) {
    update->wait(block);
    const std::lock_guard lock(update_mutex_);
    give_back_locked(block);
  }
}

void PagedModel::finish_update() {
  std::shared_ptr<DeferredUpdate> update;
  {
    const std::lock_guard lock(update_mutex_);
    update = update_;
  }
  if (update) {
    update->wait_all();
    settle_update();
  }
}

void PagedModel::settle_update() {
  const std::lock_guard lock(update_mutex_);
  if (!update_) {
    return;
  }
  for (std::size_t block = 0; block < backings_.size(); ++block) {
    if (update_->finished(static_cast<std::int32_t>(block))) {
      give_back_locked(static_cast<std::int32_t>(block));
    }
  }
  if (withheld_.empty()) {
    update_seconds_ += update_->seconds();
    update_.reset();
  }
}

}  // namespace hydra
