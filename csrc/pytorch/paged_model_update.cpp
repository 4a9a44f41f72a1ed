// An optimizer step that runs behind the model's back: what it writes is withheld until it is written.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/paged_model.h"

namespace hydra {

// ---- a step -----------------------------------------------------------------------------------

void PagedModel::defer_update(std::vector<BlockUpdate> updates, std::shared_ptr<ThreadPool> pool, float scale) {
  HYDRA_EXPECT(!closed_ && !window_open(), StateError,
               "an optimizer step during the model's forward or backward, or after its context");
  finish_update();
  if (disk_) {
    disk_->expect_gradients();  // before anything is changed
  }
  std::vector<DeferredUpdate::Part> parts;
  for (const BlockUpdate& update : updates) {
    parts.push_back(part_of(update));
  }
  const std::lock_guard lock(update_mutex_);
  for (BlockUpdate& update : updates) {
    for (HostParameter* parameter : backings_[static_cast<std::size_t>(update.block)]->parameters()) {
      parameter->note_withheld();
      if (parameter->version() != parameter->version_seen) {
        parameter->face.unsafeGetTensorImpl()->bump_version();  // for backwards of graphs from before
      }
    }
    withheld_[update.block];
    for (const at::Tensor& tensor : update.tensors) {
      if (!disk_ || !disk_->holds(tensor)) {
        withheld_[update.block].push_back(withhold(tensor, weak_from_this(), update.block));
      }
    }
  }
  trainable_stale_ = true;
  ++deferred_updates_;
  update_ = DeferredUpdate::begin(std::move(parts), std::move(pool), scale, backend_->host_memory_bytes_per_second(),
                                  &backend_->activity());
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

double PagedModel::update_wait_seconds() const {
  const std::lock_guard lock(update_mutex_);
  return update_wait_seconds_;
}

void PagedModel::note_update_wait(Activity::Time begin, double seconds, std::int32_t block) {
  if (seconds > 0.0) {
    backend_->activity().add_since(begin, ActivityRow::kCompute, ActivityKind::kWaitForUpdate, {.block = block});
    const std::lock_guard lock(update_mutex_);
    update_wait_seconds_ += seconds;
  }
}

Bytes PagedModel::update_bytes() const {
  const std::lock_guard lock(update_mutex_);
  return update_bytes_ + (update_ ? update_->bytes() : 0);
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
    if (!parameter->on_disk()) {
      parameter->note_given_back();
    }
    parameter->note_seen();  // a slot that has older bytes is stale by trainable_stale_, or has been
  }
}

void PagedModel::finish_update(std::int32_t block) {
  expect_disk_here();
  std::shared_ptr<DeferredUpdate> update;
  {
    const std::lock_guard lock(update_mutex_);
    update = update_;
  }
  if (update) {
    const Activity::Time begin = backend_->activity().now();
    note_update_wait(begin, update->wait(block), block);
    const std::lock_guard lock(update_mutex_);
    give_back_locked(block);
  }
}

void PagedModel::finish_update() {
  expect_disk_here();
  std::shared_ptr<DeferredUpdate> update;
  {
    const std::lock_guard lock(update_mutex_);
    update = update_;
  }
  if (update) {
    const Activity::Time begin = backend_->activity().now();
    note_update_wait(begin, update->wait_all(), -1);
    settle_update();
  }
}

bool PagedModel::settle(std::int32_t block, const std::vector<at::Tensor>& state) {
  HYDRA_EXPECT(!closed_ && !window_open(), StateError,
               "a block moves to the device during the model's forward or backward, or after its context");
  finish_update(block);
  const std::lock_guard gate(gate_);
  HYDRA_EXPECT(!closed_ && !window_open(), StateError,
               "a block moves to the device while another thread is inside the model");
  if (homes_.holds(block)) {
    return true;
  }
  return synchronise_block(block) &&
         homes_.settle(block, *backings_[static_cast<std::size_t>(block)], state, weak_from_this());
}

void PagedModel::update_at_home(const BlockUpdate& update, ThreadPool& pool, float scale) {
  HYDRA_EXPECT(!closed_ && !window_open(), StateError,
               "an optimizer step during the model's forward or backward, or after its context");
  if (!homes_.update(update.block, update.plan, pool, scale)) {
    update.plan.on_host().run(pool, scale);
    trainable_stale_ = true;
  }
}

void scale_gradient(const at::Tensor& gradient, double factor) {
  const WithheldPtr withheld = withheld_of(gradient);
  const std::shared_ptr<PagedModel> model = withheld ? withheld->owner.lock() : nullptr;
  if (!model || !(model->homes().multiply_gradient(gradient, factor) || model->scale_on_disk(gradient, factor))) {
    const at::NoGradGuard no_grad;
    gradient.mul_(python_number(factor));
  }
}

void PagedModel::abandon_update() noexcept {
  const std::lock_guard lock(update_mutex_);
  while (!withheld_.empty()) {
    give_back_locked(withheld_.begin()->first);
  }
  update_.reset();
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
    update_bytes_ += update_->bytes();
    update_.reset();
  }
}

}  // namespace hydra
