#include "csrc/pytorch/gradients/gradient_gathering.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace hydra {

namespace {

/// Whether the host's gradient will equal the sum on the device, and no hook observes how it forms.
bool host_can_wait(const HostParameter& parameter) {
  return !parameter.host.unsafeGetTensorImpl()->grad().defined() &&
         !torch::autograd::impl::post_acc_grad_hooks(parameter.host);
}

bool may_stay(HostParameter& parameter) {
  const at::Tensor& gradient = gradient_of(parameter.face);
  const bool plain = gradient.layout() == at::kStrided && gradient.is_non_overlapping_and_dense();
  return plain && !gradient.requires_grad() && gradient.scalar_type() == parameter.host_dtype &&
         host_can_wait(parameter);
}

}  // namespace

void GradientGathering::begin() {
  const std::lock_guard lock(mutex_);
  active_ = true;
}

void GradientGathering::begin_early() {
  const std::lock_guard lock(mutex_);
  active_ = early_ = true;
}

bool GradientGathering::would_keep(const HostParameter& parameter) const {
  return parameter.face.scalar_type() == parameter.host_dtype && host_can_wait(parameter);
}

bool GradientGathering::keep_early(HostParameter& parameter) {
  {
    const std::lock_guard lock(mutex_);
    if (!early_) {
      return false;
    }
  }
  return keep(parameter);
}

bool GradientGathering::keep(HostParameter& parameter) {
  const std::lock_guard lock(mutex_);
  if (!active_ || !(early_ || may_stay(parameter))) {
    return false;
  }
  if (std::find(kept_.begin(), kept_.end(), &parameter) == kept_.end()) {
    kept_.push_back(&parameter);
  }
  return true;
}

at::Tensor GradientGathering::take(HostParameter& parameter) {
  const auto known =
      std::find_if(carried_.begin(), carried_.end(), [&](const auto& carried) { return carried.first == &parameter; });
  if (known != carried_.end()) {
    at::Tensor gradient = std::move(known->second);
    carried_.erase(known);
    return gradient;
  }
  const std::lock_guard lock(mutex_);
  if (std::erase(kept_, &parameter) == 0) {
    return {};
  }
  if (parameter.host.unsafeGetTensorImpl()->grad().defined()) {
    kept_.push_back(&parameter);  // it has to be added to the host's gradient
    return {};
  }
  return std::exchange(gradient_of(parameter.face), at::Tensor());
}

std::vector<HostParameter*> GradientGathering::take_all() {
  const std::lock_guard lock(mutex_);
  active_ = early_ = false;
  return std::exchange(kept_, {});
}

void GradientGathering::carry() {
  for (HostParameter* parameter : take_all()) {
    carried_.emplace_back(parameter, std::exchange(gradient_of(parameter->face), at::Tensor()));
  }
}

void GradientGathering::drop_carried() noexcept { carried_.clear(); }

Bytes GradientGathering::end(const HandOver& hand_over) {
  Bytes bytes = 0;
  for (auto& [parameter, gradient] : std::exchange(carried_, {})) {
    bytes += static_cast<Bytes>(gradient.nbytes());
    hand_over(*parameter, std::move(gradient));
  }
  for (HostParameter* parameter : take_all()) {
    if (at::Tensor gradient = std::exchange(gradient_of(parameter->face), at::Tensor()); gradient.defined()) {
      bytes += static_cast<Bytes>(gradient.nbytes());
      hand_over(*parameter, std::move(gradient));
    }
  }
  return bytes;
}

void GradientGathering::discard() noexcept {
  for (HostParameter* parameter : take_all()) {
    gradient_of(parameter->face) = at::Tensor();
  }
}

}  // namespace hydra
