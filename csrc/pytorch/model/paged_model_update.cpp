// An optimizer step that runs behind the model's back: what it writes is withheld until it is written.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/model/paged_model.h"

namespace hydra {

namespace {

/// References that wrappers of Python's are, which Python itself does not refer to.
UpdateHold::ReferenceCounts wrappers_of(const std::vector<BlockUpdate>& updates) {
  UpdateHold::ReferenceCounts wrappers;
  for (const BlockUpdate& update : updates) {
    for (const at::Tensor& tensor : update.tensors) {
      const c10::Storage& storage = tensor.storage();
      wrappers[storage.unsafeGetStorageImpl()] = has_idle_wrapper(storage) ? 1 : 0;
    }
  }
  return wrappers;
}

}  // namespace

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
  UpdateHold::ReferenceCounts kept = wrappers_of(updates);
  std::set<std::int32_t> known_elsewhere;
  {
    UpdateHold::Departed departed;
    const std::lock_guard lock(update_mutex_);
    std::vector<UpdateHold::Share> shares;
    std::transform(updates.begin(), updates.end(), std::back_inserter(shares),
                   [this](const BlockUpdate& update) { return share_of(update); });
    hold_.take(shares, weak_from_this());
    try {
      add_references_kept(kept);
      known_elsewhere = hold_.known_elsewhere(kept);
      update_ = DeferredUpdate::begin(std::move(parts), std::move(pool), scale,
                                      backend_->host_memory_bytes_per_second(), &backend_->activity());
    } catch (...) {  // re-raised: no thread, say, and nothing is updated
      give_all_back_locked(departed);
      throw;
    }
    ++deferred_updates_;
    for (const std::int32_t block : hold_.blocks()) {
      backings_[static_cast<std::size_t>(block)]->wait_before_fill(update_);
    }
  }
  for (const std::int32_t block : known_elsewhere) {
    finish_update(block);
  }
}

UpdateHold::Share PagedModel::share_of(const BlockUpdate& update) {
  std::set<const c10::TensorImpl*> written;
  UpdateHold::Share share{.blocks = update.blocks, .parameters = {}, .tensors = {}};
  for (const at::Tensor& tensor : update.tensors) {
    written.insert(tensor.unsafeGetTensorImpl());
    if (!disk_ || !disk_->holds(tensor)) {
      share.tensors.push_back(tensor);
    }
  }
  for (const std::int32_t block : update.blocks) {
    for (HostParameter* parameter : backings_[static_cast<std::size_t>(block)]->parameters()) {
      if (!written.contains(parameter->host.unsafeGetTensorImpl())) {
        continue;
      }
      parameter->note_moved();
      if (!disk_ || !disk_->holds(parameter->host)) {
        share.parameters.push_back(parameter);
      }
    }
  }
  return share;
}

void PagedModel::add_references_kept(UpdateHold::ReferenceCounts& kept) const {
  for (const auto& parameter : parameters_) {
    const at::Tensor& gradient = parameter->host.unsafeGetTensorImpl()->grad();
    ++kept[parameter->withheld_storage.unsafeGetStorageImpl()];
    ++kept[parameter->gradient_storage.unsafeGetStorageImpl()];
    if (gradient.defined() && sink_->norm().holds(*parameter)) {
      ++kept[gradient.storage().unsafeGetStorageImpl()];
    }
  }
}

std::vector<BlockList> PagedModel::overlapping_blocks(const std::vector<at::Tensor>& others) const {
  std::vector<std::pair<HostExtent, std::int32_t>> extents;
  for (const auto& parameter : parameters_) {
    extents.emplace_back(parameter->extent(), parameter->page->block);
  }
  for (const at::Tensor& other : others) {
    if (!withheld_of(other)) {
      const auto* const begin = static_cast<const std::byte*>(other.const_data_ptr());
      extents.emplace_back(HostExtent{begin, begin + other.nbytes()}, -1);
    }
  }
  std::erase_if(extents, [](const auto& each) { return each.first.begin == each.first.end; });
  std::sort(extents.begin(), extents.end(),
            [](const auto& one, const auto& other) { return one.first.begin < other.first.begin; });
  std::vector<BlockList> groups;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    std::set<std::int32_t> group{extents[i].second};
    HostExtent joined = extents[i].first;
    for (; i + 1 < extents.size() && joined.overlaps(extents[i + 1].first); ++i) {
      group.insert(extents[i + 1].second);
      joined.end = std::max(joined.end, extents[i + 1].first.end);
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

void PagedModel::give_back_locked(std::int32_t block, UpdateHold::Departed& departed) noexcept {
  if (!hold_.blocks().contains(block)) {
    return;
  }
  backings_[static_cast<std::size_t>(block)]->wait_before_fill(nullptr);
  hold_.end(block, departed);
}

void PagedModel::give_all_back_locked(UpdateHold::Departed& departed) noexcept {
  while (!hold_.blocks().empty()) {
    give_back_locked(*hold_.blocks().begin(), departed);
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
    UpdateHold::Departed departed;
    const std::lock_guard lock(update_mutex_);
    if (update_ == update) {  // else another step writes the block now
      give_back_locked(block, departed);
    }
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
  std::shared_ptr<DeferredUpdate> ended;  // without the lock, as it has tensors
  UpdateHold::Departed departed;
  const std::lock_guard lock(update_mutex_);
  give_all_back_locked(departed);
  ended = std::exchange(update_, nullptr);
}

void PagedModel::settle_update() {
  std::shared_ptr<DeferredUpdate> ended;  // without the lock, as it has tensors
  UpdateHold::Departed departed;
  const std::lock_guard lock(update_mutex_);
  if (!update_) {
    return;
  }
  for (const std::int32_t block : std::set(hold_.blocks())) {
    if (update_->finished(block)) {
      give_back_locked(block, departed);
    }
  }
  if (hold_.blocks().empty()) {
    update_seconds_ += update_->seconds();
    update_bytes_ += update_->bytes();
    ended = std::exchange(update_, nullptr);
  }
}

}  // namespace hydra
