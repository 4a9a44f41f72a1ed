#include "csrc/pytorch/gradient_gathering.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace hydra {

namespace {

at::Tensor& gradient_of(HostParameter& parameter) { return parameter.face.unsafeGetTensorImpl()->mutable_grad(); }

bool may_stay(HostParameter& parameter) {
  const at::Tensor& gradient = gradient_of(parameter);
  const bool plain = gradient.layout() == at::kStrided && gradient.is_non_overlapping_and_dense();
  return plain && !gradient.requires_grad() && gradient.scalar_type() == parameter.host_dtype &&
         !parameter.host.unsafeGetTensorImpl()->grad().defined() &&
         !torch::autograd::impl::post_acc_grad_hooks(parameter.host);
}

}  // namespace

void GradientGathering::begin() {
  const std::lock_guard lock(mutex_);
  active_ = true;
}

bool GradientGathering::keep(HostParameter& parameter) {
  const std::lock_guard lock(mutex_);
  if (!active_ || !may_stay(parameter)) {
    return false;
  }
  if (std::find(kept_.begin(), kept_.end(), &parameter) == kept_.end()) {
    kept_.push_back(&parameter);
  }
  return true;
}

at::Tensor GradientGathering::take(HostParameter& parameter) {
  const std::lock_guard lock(mutex_);
  if (std::erase(kept_, &parameter) == 0) {
    return {};
  }
  if (parameter.host.unsafeGetTensorImpl()->grad().defined()) {
    kept_.push_back(&parameter);  // it is added to that, on the host
    return {};
  }
  return std::exchange(gradient_of(parameter), at::Tensor());
}

std::vector<HostParameter*> GradientGathering::take_all() {
  const std::lock_guard lock(mutex_);
  active_ = false;
  return std::exchange(kept_, {});
}

Bytes GradientGathering::end(GradientSink& sink) {
  Bytes bytes = 0;
  for (HostParameter* parameter : take_all()) {
    if (at::Tensor gradient = std::exchange(gradient_of(*parameter), at::Tensor()); gradient.defined()) {
      bytes += static_cast<Bytes>(gradient.nbytes());
      sink.accept(*parameter, std::move(gradient));
    }
  }
  return bytes;
}

void GradientGathering::discard() noexcept {
  for (HostParameter* parameter : take_all()) {
    gradient_of(*parameter) = at::Tensor();
  }
}

}  // namespace hydra
