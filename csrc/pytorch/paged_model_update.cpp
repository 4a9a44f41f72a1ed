// An optimizer step that runs behind the model's back: what it writes is withheld until it is written.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <tuple>
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
  std::set<std::int32_t> known_elsewhere;
  {
    const std::lock_guard lock(update_mutex_);
    for (const BlockUpdate& update : updates) {
      take_locked(update);
    }
    known_elsewhere = hold_.known_elsewhere(references_kept());
    ++deferred_updates_;
    update_ = DeferredUpdate::begin(std::move(parts), std::move(pool), scale, backend_->host_memory_bytes_per_second(),
                                    &backend_->activity());
    for (const std::int32_t block : hold_.blocks()) {
      backings_[static_cast<std::size_t>(block)]->wait_before_fill(update_);
    }
  }
  for (const std::int32_t block : known_elsewhere) {
    finish_update(block);
  }
}

void PagedModel::take_locked(const BlockUpdate& update) {
  std::set<const c10::TensorImpl*> written;
  std::vector<at::Tensor> here;
  for (const at::Tensor& tensor : update.tensors) {
    written.insert(tensor.unsafeGetTensorImpl());
    if (!disk_ || !disk_->holds(tensor)) {
      here.push_back(tensor);
    }
  }
  std::vector<HostParameter*> parameters;
  for (const std::int32_t block : update.blocks) {
    for (HostParameter* parameter : backings_[static_cast<std::size_t>(block)]->parameters()) {
      if (!written.contains(parameter->host.unsafeGetTensorImpl())) {
        continue;
      }
      parameter->note_moved();
      if (!disk_ || !disk_->holds(parameter->host)) {
        parameters.push_back(parameter);
      }
    }
  }
  hold_.take(update.blocks, parameters, here, weak_from_this());
}

UpdateHold::ReferenceCounts PagedModel::references_kept() const {
  UpdateHold::ReferenceCounts kept;
  for (const auto& parameter : parameters_) {
    const at::Tensor& gradient = parameter->host.unsafeGetTensorImpl()->grad();
    ++kept[parameter->withheld_storage.unsafeGetStorageImpl()];
    ++kept[parameter->gradient_storage.unsafeGetStorageImpl()];
    if (gradient.defined() && sink_->norm().holds(*parameter)) {
      ++kept[gradient.storage().unsafeGetStorageImpl()];
    }
  }
  return kept;
}

std::vector<BlockList> PagedModel::overlapping_blocks() const {
  struct Extent {
    const c10::StorageImpl* storage;
    std::int64_t begin;
    std::int64_t end;
    std::int32_t block;
  };
  std::vector<Extent> extents;
  for (const auto& parameter : parameters_) {
    const std::int64_t begin = parameter->host.storage_offset() * static_cast<std::int64_t>(parameter->host.itemsize());
    if (parameter->shares() && parameter->host_bytes() > 0) {
      extents.push_back({parameter->host.storage().unsafeGetStorageImpl(), begin, begin + parameter->host_bytes(),
                         parameter->page->block});
    }
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& one, const Extent& other) {
    return std::tie(one.storage, one.begin) < std::tie(other.storage, other.begin);
  });
  std::vector<BlockList> groups;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    std::set<std::int32_t> group{extents[i].block};
    std::int64_t end = extents[i].end;
    for (; i + 1 < extents.size() && extents[i + 1].storage == extents[i].storage && extents[i + 1].begin < end; ++i) {
      group.insert(extents[i + 1].block);
      end = std::max(end, extents[i + 1].end);
    }
    if (group.size() > 1) {
      groups.emplace_back(group.begin(), group.end());
    }
  }
  return groups;
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
  if (!hold_.blocks().contains(block)) {
    return;
  }
  backings_[static_cast<std::size_t>(block)]->wait_before_fill(nullptr);
  hold_.end(block);
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

void PagedModel::finish_update(std::int32_t block, const c10::Storage& storage) {
  std::set<std::int32_t> users;
  {
    const std::lock_guard lock(update_mutex_);
    users = hold_.users(storage);
  }
  finish_update(block);
  for (const std::int32_t user : users) {
    finish_update(user);
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
  HYDRA_EXPECT(update.blocks.size() == 1, StateError, "blocks whose weights overlap are updated at home on the device");
  const std::int32_t block = update.blocks.front();
  if (!homes_.update(block, update.plan, pool, scale)) {
    update.plan.on_host().run(pool, scale);
    for (HostParameter* parameter : backings_[static_cast<std::size_t>(block)]->parameters()) {
      parameter->note_moved();
    }
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
  while (!hold_.blocks().empty()) {
    give_back_locked(*hold_.blocks().begin());
  }
  update_.reset();
}

void PagedModel::settle_update() {
  const std::lock_guard lock(update_mutex_);
  if (!update_) {
    return;
  }
  for (const std::int32_t block : std::set(hold_.blocks())) {
    if (update_->finished(block)) {
      give_back_locked(block);
    }
  }
  if (hold_.blocks().empty()) {
    update_seconds_ += update_->seconds();
    update_bytes_ += update_->bytes();
    update_.reset();
  }
}

}  // namespace hydra
