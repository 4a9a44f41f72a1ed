#include "csrc/pytorch/model/host_changes.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/parameters/face_writes.h"
#include "csrc/pytorch/parameters/overlapping_memory.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

void append(std::string& list, const char* separator, const std::string& item) {
  list += (list.empty() || item.empty() ? "" : separator) + item;
}

/// A tensor with the host's shape, and with memory in the region.
at::Tensor in_region(const ArenaRegionPtr& region, Bytes offset, const at::Tensor& host) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(storage_in(region, offset, static_cast<Bytes>(host.nbytes())),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  return tensor;
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
      FaceWrites::note(*parameter);
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

void HostChanges::note_host_written(const HostParameter& parameter) {
  if (!(poisons_ && gate_.open())) {  // else it has no numbers, and the write is lost
    log(parameter, parameter.host);
  }
}

// ---- for logs -------------------------------------------------------------------------------------------------------

std::shared_ptr<OverwrittenLog> HostChanges::log_overwritten(bool is_own) {
  process_.expect_here();  // in a forked child, a thread that does not exist there may hold a lock
  auto log = std::make_shared<OverwrittenLog>(blocks_.owner(), is_own);
  for (std::size_t index = 0; index < blocks_.backings().size(); ++index) {
    const bool on_host = homes_.home_of(static_cast<std::int32_t>(index)) == Home::kHost;
    const ArenaRegionPtr home = on_host ? blocks_.backings()[index]->home() : nullptr;
    for (const auto& [parameter, offset] : blocks_.backings()[index]->places()) {
      // A storage of its own, because the number of references to the host's tells whether it may move.
      log->watch(*parameter, home ? in_region(home, offset, parameter->host) : parameter->host.variable_data());
    }
  }
  const std::lock_guard lock(logs_mutex_);
  std::erase_if(logs_, [](const auto& each) { return each.expired(); });
  logs_.push_back(log);
  return log;
}

std::vector<std::shared_ptr<OverwrittenLog>> HostChanges::logs() {
  std::vector<std::shared_ptr<OverwrittenLog>> alive;
  const std::lock_guard lock(logs_mutex_);
  for (const auto& each : logs_) {
    if (std::shared_ptr<OverwrittenLog> log = each.lock()) {
      alive.push_back(std::move(log));
    }
  }
  return alive;
}

void HostChanges::note_entry() {
  for (const auto& each : logs()) {
    each->note_entry();
  }
}

void HostChanges::log(const HostParameter& parameter, const at::Tensor& source) {
  std::vector<std::shared_ptr<OverwrittenLog>> logs = this->logs();
  std::erase_if(logs, [&](const auto& each) { return !each->concerns_this_thread() || each->has(parameter); });
  if (logs.empty()) {
    return;
  }
  const at::Tensor before = numbers_on_host(source);
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
