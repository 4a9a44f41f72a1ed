#include "csrc/pytorch/model/pending_update.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

/// Counts, by storage, the references that an idle Python wrapper holds: Python itself does not refer to it.
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

class DiskLender final : public Lender {
 public:
  DiskLender(DiskHomes& disk, std::int32_t block, TensorPlan plan)
      : disk_(disk), block_(block), plan_(std::move(plan)), places_(disk.places(block, plan_)) {}

  void expect() noexcept override { disk_.expect(block_); }
  StepPlan borrow() override { return disk_.borrow(block_, plan_, places_); }
  void give_back() override { disk_.give_back(block_); }

 private:
  DiskHomes& disk_;
  std::int32_t block_;
  TensorPlan plan_;
  DiskHomes::Places places_;
};

}  // namespace

// ---- begin ------------------------------------------------------------------------------------

void PendingUpdate::defer(std::vector<BlockUpdate> updates, std::shared_ptr<ThreadPool> pool, float scale) {
  gate_.expect_outside("an optimizer step cannot run during the model's forward or backward, or after its context");
  finish();
  if (DiskHomes* const disk = disk_.homes()) {
    disk->expect_gradients();  // before anything is changed
  }
  std::vector<DeferredUpdate::Part> parts;
  for (const BlockUpdate& update : updates) {
    parts.push_back(part_of(update));
  }
  UpdateHold::ReferenceCounts kept = wrappers_of(updates);
  std::set<std::int32_t> known_elsewhere;
  {
    UpdateHold::Departed departed;
    const std::lock_guard lock(mutex_);
    std::vector<UpdateHold::Share> shares;
    std::transform(updates.begin(), updates.end(), std::back_inserter(shares),
                   [this](const BlockUpdate& update) { return share_of(update); });
    hold_.take(shares, blocks_.owner());
    try {
      add_references_kept(kept);
      known_elsewhere = hold_.known_elsewhere(kept);
      update_ = DeferredUpdate::begin(std::move(parts), std::move(pool), scale, backend_.host_memory_bytes_per_second(),
                                      &backend_.activity());
    } catch (...) {  // re-raised: for example no thread could be started; nothing is updated
      give_all_back_locked(departed);
      throw;
    }
    ++deferred_;
    for (const std::int32_t block : hold_.blocks()) {
      blocks_.backing(block).wait_before_fill(update_);
    }
  }
  for (const std::int32_t block : known_elsewhere) {
    finish(block);
  }
}

DeferredUpdate::Part PendingUpdate::part_of(const BlockUpdate& update) const {
  const bool on_disk = std::any_of(update.tensors.begin(), update.tensors.end(),
                                   [this](const at::Tensor& tensor) { return disk_.holds(tensor); });
  DeferredUpdate::Part part;
  part.blocks = update.blocks;
  if (on_disk) {
    HYDRA_EXPECT(update.blocks.size() == 1, StateError,
                 "blocks whose weights overlap cannot be updated together while some of them are on the disk");
    part.lender = std::make_unique<DiskLender>(*disk_.homes(), update.blocks.front(), update.plan);
  } else {
    part.plan = update.plan.on_host();
  }
  return part;
}

UpdateHold::Share PendingUpdate::share_of(const BlockUpdate& update) {
  std::set<const c10::TensorImpl*> written;
  UpdateHold::Share share{.blocks = update.blocks, .parameters = {}, .tensors = {}};
  for (const at::Tensor& tensor : update.tensors) {
    written.insert(tensor.unsafeGetTensorImpl());
    if (!disk_.holds(tensor)) {
      share.tensors.push_back(tensor);
    }
  }
  for (const std::int32_t block : update.blocks) {
    for (HostParameter* parameter : blocks_.parameters_of(block)) {
      if (!written.contains(parameter->host.unsafeGetTensorImpl())) {
        continue;
      }
      parameter->note_moved();
      if (!disk_.holds(parameter->host)) {
        share.parameters.push_back(parameter);
      }
    }
  }
  return share;
}

void PendingUpdate::add_references_kept(UpdateHold::ReferenceCounts& kept) const {
  for (const auto& parameter : blocks_.parameters()) {
    const at::Tensor& gradient = parameter->host.unsafeGetTensorImpl()->grad();
    ++kept[parameter->withheld_storage.unsafeGetStorageImpl()];
    ++kept[parameter->gradient_storage.unsafeGetStorageImpl()];
    if (gradient.defined() && norm_.holds(*parameter)) {
      ++kept[gradient.storage().unsafeGetStorageImpl()];
    }
  }
}

// ---- end --------------------------------------------------------------------------------------

std::shared_ptr<DeferredUpdate> PendingUpdate::running() const {
  disk_.expect_here();
  const std::lock_guard lock(mutex_);
  return update_;
}

void PendingUpdate::finish(std::int32_t block) {
  if (const std::shared_ptr<DeferredUpdate> update = running()) {
    const Activity::Time begin = backend_.activity().now();
    note_wait(begin, update->wait(block), block);
    UpdateHold::Departed departed;
    const std::lock_guard lock(mutex_);
    if (update_ == update) {  // otherwise another step writes the block now
      give_back_locked(block, departed);
    }
  }
}

void PendingUpdate::finish(std::int32_t block, const c10::Storage& storage) {
  std::set<std::int32_t> users;
  {
    const std::lock_guard lock(mutex_);
    users = hold_.users(storage);
  }
  finish(block);
  for (const std::int32_t user : users) {
    finish(user);
  }
}

void PendingUpdate::finish() {
  if (const std::shared_ptr<DeferredUpdate> update = running()) {
    const Activity::Time begin = backend_.activity().now();
    note_wait(begin, update->wait_all(), -1);
    reap();
  }
}

void PendingUpdate::reap() {
  std::shared_ptr<DeferredUpdate> ended;  // without the lock, as it has tensors
  UpdateHold::Departed departed;
  const std::lock_guard lock(mutex_);
  if (!update_) {
    return;
  }
  for (const std::int32_t block : std::set(hold_.blocks())) {
    if (update_->finished(block)) {
      give_back_locked(block, departed);
    }
  }
  if (hold_.blocks().empty()) {
    seconds_ += update_->seconds();
    bytes_ += update_->bytes();
    ended = std::exchange(update_, nullptr);
  }
}

void PendingUpdate::abandon() noexcept {
  std::shared_ptr<DeferredUpdate> ended;  // without the lock, as it has tensors
  UpdateHold::Departed departed;
  const std::lock_guard lock(mutex_);
  give_all_back_locked(departed);
  ended = std::exchange(update_, nullptr);
}

void PendingUpdate::give_back_locked(std::int32_t block, UpdateHold::Departed& departed) noexcept {
  if (!hold_.blocks().contains(block)) {
    return;
  }
  blocks_.backing(block).wait_before_fill(nullptr);
  hold_.end(block, departed);
}

void PendingUpdate::give_all_back_locked(UpdateHold::Departed& departed) noexcept {
  while (!hold_.blocks().empty()) {
    give_back_locked(*hold_.blocks().begin(), departed);
  }
}

// ---- figures ----------------------------------------------------------------------------------

void PendingUpdate::note_wait(Activity::Time begin, double seconds, std::int32_t block) {
  if (seconds > 0.0) {
    backend_.activity().add_since(begin, ActivityRow::kCompute, ActivityKind::kWaitForUpdate, {.block = block});
    const std::lock_guard lock(mutex_);
    wait_seconds_ += seconds;
  }
}

std::int64_t PendingUpdate::deferred() const {
  const std::lock_guard lock(mutex_);
  return deferred_;
}

double PendingUpdate::seconds() const {
  const std::lock_guard lock(mutex_);
  return seconds_ + (update_ ? update_->seconds() : 0.0);
}

Bytes PendingUpdate::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_ + (update_ ? update_->bytes() : 0);
}

double PendingUpdate::wait_seconds() const {
  const std::lock_guard lock(mutex_);
  return wait_seconds_;
}

}  // namespace hydra
