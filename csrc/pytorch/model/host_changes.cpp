#include "csrc/pytorch/model/host_changes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/parameters/overlapping_memory.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

void append(std::string& list, const char* separator, const std::string& item) {
  list += (list.empty() || item.empty() ? "" : separator) + item;
}

}  // namespace

void HostChanges::forget() noexcept {
  if (process_.here()) {  // in a forked child, a thread that does not exist there may hold the lock
    overlapping_memory::forget(this);
  }
}

void HostChanges::note_optimizer_step() {
  for (const auto& parameter : blocks_.parameters()) {
    if (parameter->host.requires_grad() || parameter->host.unsafeGetTensorImpl()->grad().defined()) {
      parameter->moved = true;
    }
  }
}

std::string HostChanges::moved() const {
  std::string names;
  for (const auto& parameter : blocks_.parameters()) {
    if (parameter->version() != parameter->version_seen) {
      append(names, ", ", "'" + parameter->name + "'");
    }
  }
  return names;
}

// ---- from hosts to slots ----------------------------------------------------------------------

void HostChanges::synchronise() {
  const bool all_stale = all_stale_.exchange(false);
  spread_moves();
  std::string mismatches;
  for (std::size_t index = 0; index < blocks_.backings().size(); ++index) {
    const auto block = static_cast<std::int32_t>(index);
    BlockBacking& backing = blocks_.backing(block);
    if (homes_.home_of(block) == Home::kDevice) {
      synchronise_home(backing);
    } else if (synchronise(backing, all_stale, mismatches)) {
      backing.host_changed();
      pager_.contents().invalidate(block);
    }
  }
  if (!mismatches.empty()) {
    all_stale_ = true;  // those that differ were not brought up to date
  }
  HYDRA_EXPECT(mismatches.empty(), ModelChanged,
               "parameters changed inside the offload context: " + mismatches +
                   ". Leave the context, change them, and enter it again");
}

bool HostChanges::synchronise(std::int32_t block) {
  BlockBacking& backing = blocks_.backing(block);
  spread_moves();
  std::string mismatches;
  if (synchronise(backing, all_stale_, mismatches)) {
    backing.host_changed();
    pager_.contents().invalidate(block);
  }
  return mismatches.empty();
}

void HostChanges::synchronise_for_fault(std::int32_t block) {
  const auto gate = gate_.hold();
  const ReleaseGilIfHeld released;
  if (!gate_.closed() && !gate_.open() && homes_.home_of(block) != Home::kDevice) {
    synchronise(block);
  }
}

bool HostChanges::synchronise(const BlockBacking& backing, bool all_stale, std::string& mismatches) {
  bool stale = false;
  for (HostParameter* parameter : backing.parameters()) {
    stale = synchronise(*parameter, all_stale, mismatches) || stale;
  }
  return stale;
}

bool HostChanges::synchronise(HostParameter& parameter, bool all_stale, std::string& mismatches) {
  if (const WithheldPtr others = parameter.withheld() ? nullptr : withheld_of(parameter.host)) {
    if (const std::shared_ptr<PagedModel> owner = others->owner.lock()) {
      owner->moves().bring_home(others->block, parameter.host.storage());
    }
  }
  const std::string mismatch = parameter.mismatch();
  if (!mismatch.empty()) {
    append(mismatches, "; ", mismatch);
    return false;
  }
  follow_training(parameter);
  if (!parameter.changed_since_seen() && !all_stale) {
    return false;
  }
  parameter.note_seen();
  return true;
}

void HostChanges::synchronise_home(const BlockBacking& backing) {
  for (HostParameter* parameter : backing.parameters()) {
    follow_training(*parameter);
    parameter->changed_since_seen();  // the face's version follows
    parameter->note_seen();
  }
}

void HostChanges::follow_training(HostParameter& parameter) {
  parameter.trained_seen = parameter.host.requires_grad();
  if (parameter.face.requires_grad() != parameter.trained_seen) {
    parameter.face.set_requires_grad(parameter.trained_seen);
  }
  if (parameter.trained_seen && !parameter.diversion) {
    gradients_.divert(parameter);
  }
}

// ---- to parameters that share memory ----------------------------------------------------------

void HostChanges::spread_moves() {
  std::vector<HostExtent> written;
  std::vector<HostExtent> overlapping;
  for (const auto& parameter : blocks_.parameters()) {
    if (parameter->withheld() || !parameter->may_overlap()) {
      continue;
    }
    if (parameter->moved || parameter->version() != parameter->version_seen) {
      written.push_back(parameter->reach());
    }
    overlapping.push_back(parameter->reach());
  }
  // Other models may have written to shared memory without a trace here.
  const auto others = overlapping_memory::exchange(this, std::move(overlapping));
  written.insert(written.end(), others.begin(), others.end());
  mark_moved(std::move(written));
}

void HostChanges::mark_moved(std::vector<HostExtent> written) {
  if (written.empty()) {
    return;
  }
  const auto before = [](const HostExtent& one, const HostExtent& other) { return one.begin < other.begin; };
  std::sort(written.begin(), written.end(), before);
  std::vector<HostExtent> joined;
  for (const HostExtent& each : written) {
    if (!joined.empty() && each.begin < joined.back().end) {
      joined.back().end = std::max(joined.back().end, each.end);
    } else {
      joined.push_back(each);
    }
  }
  for (const auto& parameter : blocks_.parameters()) {
    const HostExtent extent = parameter->extent();
    const auto next = std::lower_bound(joined.begin(), joined.end(), HostExtent{extent.end, extent.end}, before);
    if (next != joined.begin() && std::prev(next)->overlaps(extent)) {
      parameter->moved = true;
    }
  }
}

// ---- from faces to hosts ----------------------------------------------------------------------

void HostChanges::note_face_written(const Page& page) {
  if (DiskHomes* const disk = homes_.disk().homes()) {
    const ReleaseGilIfHeld released;
    disk->bring_weights_home(page.block);  // write-backs need them there
  }
  for (const HostParameter* parameter : blocks_.parameters_of(page.block)) {
    if (parameter->page.get() == &page) {
      TORCH_CHECK(parameter->same_dtype(), "hydra_ext: the forward writes in place to '", page.name,
                  "', whose device copy is ", parameter->face.scalar_type(), " while its host parameter is ",
                  parameter->host.scalar_type(), "; the write would be lost. Leave param_dtype unset for this model");
      log(*parameter, parameter->paged);
      parameter->page->written = true;
    }
  }
  pager_.contents().mark_dirty(page.block);
}

void HostChanges::note_written_home() {
  std::vector<HostExtent> shared;
  for (const auto& parameter : blocks_.parameters()) {
    if (parameter->page->written) {
      parameter->page->written = false;
      parameter->host.unsafeGetTensorImpl()->bump_version();
      parameter->note_seen();  // the slot has the same bytes
      if (parameter->may_overlap()) {
        shared.push_back(parameter->reach());
      }
    }
  }
  mark_moved(std::move(shared));
}

std::vector<Overwritten> OverwrittenLog::take() {
  const std::lock_guard lock(mutex_);
  std::vector<Overwritten> taken;
  for (auto& [parameter, overwritten] : std::exchange(kept_, {})) {
    taken.push_back(std::move(overwritten));
  }
  return taken;
}

bool OverwrittenLog::has(const HostParameter& parameter) const {
  const std::lock_guard lock(mutex_);
  return kept_.contains(&parameter);
}

void OverwrittenLog::add(const HostParameter& parameter, const at::Tensor& before) {
  const std::lock_guard lock(mutex_);
  kept_.try_emplace(&parameter, Overwritten{parameter.name, parameter.host, before});
}

std::shared_ptr<OverwrittenLog> HostChanges::log_overwritten() {
  auto log = std::make_shared<OverwrittenLog>();
  const std::lock_guard lock(logs_mutex_);
  std::erase_if(logs_, [](const auto& each) { return each.expired(); });
  logs_.push_back(log);
  return log;
}

void HostChanges::log(const HostParameter& parameter, const at::Tensor& source) {
  std::vector<std::shared_ptr<OverwrittenLog>> logs;
  {
    const std::lock_guard lock(logs_mutex_);
    for (const auto& each : logs_) {
      if (std::shared_ptr<OverwrittenLog> log = each.lock(); log && !log->has(parameter)) {
        logs.push_back(std::move(log));
      }
    }
  }
  if (logs.empty()) {
    return;
  }
  // The copy is an operation of ours: neither autograd nor the user's modes see it, and no budget pays for it.
  const HostScope on_the_host;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  at::Tensor before = at::empty_like(source, source.options().device(at::kCPU));
  before.copy_(source);
  for (const auto& each : logs) {
    each->add(parameter, before);
  }
}

std::string HostChanges::apply_faces() {
  const at::NoGradGuard no_grad;
  const HostScope on_the_host;
  std::string lost;
  for (const auto& parameter : blocks_.parameters()) {
    const bool trained = parameter->face.requires_grad();
    if (trained != parameter->trained_seen) {
      parameter->host.set_requires_grad(trained);
    }
    if (!parameter->detached()) {
      continue;
    }
    if (parameter->same_dtype() && parameter->mismatch().empty()) {
      log(*parameter, parameter->host);
      parameter->host.variable_data().copy_(parameter->face);  // no version counts it: none counts `.data = ...`
      parameter->moved = true;
    } else {
      lost += (lost.empty() ? "" : "; ") +
              ("the forward gave '" + parameter->name +
               "' data of another dtype or shape, which its host parameter cannot take; do so outside the forward");
    }
    parameter->attach();
  }
  return lost;
}

void HostChanges::conceal() {
  if (poisons_) {
    for (BlockBacking* backing : blocks_.backings()) {
      backing->take_aside();
    }
    for (BlockBacking* backing : blocks_.backings()) {
      backing->conceal();
    }
  }
}

void HostChanges::reveal() noexcept {
  for (BlockBacking* backing : blocks_.backings()) {
    backing->reveal();
  }
}

}  // namespace hydra
