// Gradients and optimizer steps of blocks at home on the device.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/homes/device_homes.h"
#include "csrc/pytorch/memory/acquired_block.h"
#include "csrc/pytorch/memory/counting_allocator.h"

namespace hydra {

namespace {

/// For arithmetic under the homes' mutex: no Python code runs, and allocations are not charged to a budget.
class QuietScope {
 private:
  const at::NoGradGuard no_grad_;
  const HostScope on_the_host_;
  const c10::impl::ExcludeDispatchKeyGuard no_python_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

/// Whether summing this part on the device gives the result of plain accumulation on the host.
bool can_stay(const HostParameter& parameter, const at::Tensor& part) {
  return part.layout() == at::kStrided && part.numel() > 0 && part.is_non_overlapping_and_dense() &&
         !part.requires_grad() && part.scalar_type() == parameter.host_dtype &&
         part.device() == parameter.face.device() && part.sizes() == parameter.face.sizes() &&
         part.strides() == parameter.face.strides() && !torch::autograd::impl::post_acc_grad_hooks(parameter.host);
}

/// Tells torch that the calling thread's stream uses the gradient. Its memory may be another stream's, which could
/// allocate it again while this stream is late.
void note_used(const at::Tensor& gradient) {
  const c10::Device device = gradient.device();
  if (device.is_cuda()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.recordDataPtrOnStream(gradient.storage().data_ptr(), guard.getStream(device));
  }
}

/// Tells the backend that the calling thread has enqueued a write to the gradient. Returns a fence behind the write.
FencePtr note_written(DeviceBackend& backend, const at::Tensor& gradient) {
  note_used(gradient);
  backend.note_write(gradient.mutable_data_ptr(), static_cast<Bytes>(gradient.nbytes()));
  return backend.record();
}

/// Returns `part`, or a copy if it shares its memory.
at::Tensor alone(const at::Tensor& part) {
  const bool shared = part.layout() == at::kStrided && (part.storage().use_count() > 1 || part.storage_offset() != 0);
  return shared ? part.clone() : part;
}

}  // namespace

at::Tensor python_number(double value) {
  // As the right operand a number keeps its precision. mul_() with a C++ scalar makes it the left one, and rounds it.
  const HostScope on_the_host;
  at::Tensor number = at::scalar_tensor(value, at::kDouble);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

bool DeviceHomes::keep_gradient(HostParameter& parameter, const at::Tensor& part) {
  if (!holds(parameter.page->block)) {
    return false;
  }
  const at::Tensor own = alone(part);
  Departed departed;
  const std::lock_guard lock(mutex_);
  Member* const member = member_locked(parameter);
  if (member == nullptr) {
    return false;
  }
  at::Tensor& host = gradient_of(parameter.host);
  const bool shown = shows(host, member->shown);
  const bool dropped = !host.defined() && (!member->shown || member->shown.use_count() == 1);
  if (!(shown || dropped) || !can_stay(parameter, own)) {
    bring_home_locked(parameter.page->block, departed);
    return false;
  }
  backend_.compute_follows(member->written);
  if (shown) {
    const QuietScope quiet;
    member->gradient.add_(own);
    host.unsafeGetTensorImpl()->bump_version();
  } else {
    departed.gradients.push_back(std::exchange(member->gradient, own));
    departed.storages.push_back(std::move(member->shown));
    reclassify(own.storage().data(), MemoryClass::kGradients);
    auto* const data = static_cast<std::byte*>(own.mutable_data_ptr());
    host = make_withheld(own, withheld_of(member->weights.storage)->owner, parameter.page->block, data);
    member->shown = host.storage();
  }
  member->written = note_written(backend_, member->gradient);
  return true;
}

at::Tensor DeviceHomes::gradient(const HostParameter& parameter) {
  const std::lock_guard lock(mutex_);
  const Member* const member = member_locked(parameter);
  if (member == nullptr || !shows(gradient_of(parameter.host), member->shown)) {
    return {};
  }
  backend_.compute_follows(member->written);
  return member->gradient;
}

bool DeviceHomes::replace_gradient(const HostParameter& parameter, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  Member* const member = member_locked(parameter);
  const at::Tensor& host = gradient_of(parameter.host);
  if (member == nullptr || !shows(host, member->shown)) {
    return false;
  }
  backend_.compute_follows(member->written);
  const QuietScope quiet;
  member->gradient.copy_(gradient);
  host.unsafeGetTensorImpl()->bump_version();
  member->written = note_written(backend_, member->gradient);
  return true;
}

bool DeviceHomes::multiply_gradient(const at::Tensor& host, double factor) {
  const at::Tensor number = python_number(factor);
  const std::lock_guard lock(mutex_);
  Member* const member = shown_by_locked(host);
  if (member == nullptr) {
    return false;
  }
  backend_.compute_follows(member->written);
  const QuietScope quiet;
  member->gradient.mul_(number);
  host.unsafeGetTensorImpl()->bump_version();
  member->written = note_written(backend_, member->gradient);
  return true;
}

std::vector<std::optional<double>> DeviceHomes::sums_of_squares(const std::vector<at::Tensor>& hosts,
                                                                ThreadPool& pool) {
  for (;;) {
    try {
      return sums_at_home(hosts, pool);
    } catch (const OutOfMemory&) {  // re-raised if nothing can make room, which these homes may have to
      if (!pager_.evict_one()) {
        throw;
      }
    }
  }
}

std::vector<std::optional<double>> DeviceHomes::sums_at_home(const std::vector<at::Tensor>& hosts, ThreadPool& pool) {
  std::vector<std::optional<double>> sums(hosts.size());
  std::vector<std::size_t> places;
  std::vector<NormInput> inputs;
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (const Member* const member = shown_by_locked(hosts[i])) {
      backend_.compute_follows(member->written);
      places.push_back(i);
      inputs.push_back(norm_input(hosts[i], member->gradient.const_data_ptr()));
    }
  }
  std::vector<double> found(places.size());
  if (math_ != nullptr) {
    math_->sums_of_squares(inputs, found);
  } else {
    hydra::sums_of_squares(inputs, found, pool);
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    sums[places[i]] = found[i];
  }
  return sums;
}

bool DeviceHomes::reviewed_locked(Home& home, Departed& departed) {
  for (Member& member : home.members) {
    const HostParameter& parameter = *member.parameter;
    if (!parameter.withheld() || !parameter.mismatch().empty()) {
      return false;  // the user has given it other bytes, on the host
    }
    if (!member.shown || shows(gradient_of(parameter.host), member.shown)) {
      continue;
    }
    if (member.shown.use_count() > 1) {
      return false;  // the user has kept it
    }
    backend_.compute_follows(member.written);  // the gradient's memory is released
    departed.storages.push_back(std::move(member.shown));
    departed.gradients.push_back(std::exchange(member.gradient, at::Tensor()));
  }
  return true;
}

void DeviceHomes::review() {
  Departed departed;
  const std::lock_guard lock(mutex_);
  for (std::size_t block = 0; block < homes_.size(); ++block) {
    if (homes_[block] && !reviewed_locked(*homes_[block], departed)) {
      bring_home_locked(static_cast<std::int32_t>(block), departed);
    }
  }
}

bool DeviceHomes::update(std::int32_t block, const TensorPlan& plan, ThreadPool& pool, float scale) {
  pager_.acquire(block, AcquireReason::kHook);
  const AcquiredBlock acquired(pager_, block);
  const std::lock_guard lock(mutex_);
  Home* const home = find_locked(block);
  const auto here = home == nullptr ? std::nullopt : plan.at(&home_data);
  if (!here) {
    return false;
  }
  for (const Member& member : home->members) {
    backend_.compute_follows(member.written);
  }
  if (math_ != nullptr) {
    math_->run(*here, scale);
  } else {
    here->run(pool, scale);
  }
  for (const Member& member : home->members) {
    if (member.gradient.defined()) {
      note_used(member.gradient);
    }
    member.parameter->changed_since_seen();
    member.parameter->note_seen();
    backend_.note_write(home->slot + member.parameter->page->offset, member.parameter->face_bytes());
  }
  if (home->memory != nullptr) {
    backend_.note_write(home->memory, home->memory_bytes);
  }
  home->updated = backend_.record();
  pager_.contents().note_written(block, home->updated);
  return true;
}

}  // namespace hydra
