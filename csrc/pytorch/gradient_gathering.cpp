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

std::vector<HostParameter*> GradientGathering::take() {
  const std::lock_guard lock(mutex_);
  active_ = false;
  return std::exchange(kept_, {});
}

void GradientGathering::end(GradientSink& sink) {
  for (HostParameter* parameter : take()) {
    if (at::Tensor gradient = std::exchange(gradient_of(*parameter), at::Tensor()); gradient.defined()) {
      sink.accept(*parameter, std::move(gradient));
    }
  }
}

void GradientGathering::discard() noexcept {
  for (HostParameter* parameter : take()) {
    gradient_of(*parameter) = at::Tensor();
  }
}

}  // namespace hydra
