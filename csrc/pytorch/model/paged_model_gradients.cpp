// Gradients that others work on between backward and the host: they are taken, changed and handed over.
#include <ATen/core/grad_mode.h>

#include "csrc/pytorch/model/paged_model.h"

namespace hydra {

std::vector<at::Tensor> PagedModel::take_gathered(std::int32_t block) {
  std::vector<at::Tensor> taken;
  for (HostParameter* parameter : backings_[static_cast<std::size_t>(block)]->parameters()) {
    const at::Tensor at_home = homes_.gradient(*parameter);
    taken.push_back(at_home.defined() ? at_home.clone() : gathering_.take(*parameter));
  }
  return taken;
}

std::vector<bool> PagedModel::settle_gradients(std::int32_t block) {
  const auto& parameters = backings_[static_cast<std::size_t>(block)]->parameters();
  sink_->bring_home(parameters);
  const GradientState settled = window_open() ? GradientState::kSettled : GradientState::kUnchanged;
  std::vector<bool> arrived;
  for (HostParameter* parameter : parameters) {
    arrived.push_back(parameter->gradient_state.exchange(settled) == GradientState::kArrived);
  }
  return arrived;
}

void PagedModel::return_gathered(std::int32_t block, std::size_t index, at::Tensor gradient) {
  HostParameter& parameter = *backings_[static_cast<std::size_t>(block)]->parameters().at(index);
  if (homes_.replace_gradient(parameter, gradient)) {
    return;
  }
  if (at::Tensor& host = parameter.host.unsafeGetTensorImpl()->mutable_grad(); host.defined()) {  // it has come home
    if (FencePtr fence = backend_->record()) {
      fence->wait();
    }
    const at::NoGradGuard no_grad;
    const HostScope on_the_host;
    host.copy_(gradient);
    return;
  }
  hand_over(parameter, std::move(gradient));
  if (!window_open()) {
    sink_->drain();
  }
}

void PagedModel::hand_over(HostParameter& parameter, at::Tensor gradient) {
  if (!homes_.keep_gradient(parameter, gradient)) {
    sink_->accept(parameter, std::move(gradient));
  }
}

void PagedModel::reopen_gradients() noexcept {
  for (const auto& parameter : parameters_) {
    auto settled = GradientState::kSettled;
    parameter->gradient_state.compare_exchange_strong(settled, GradientState::kUnchanged);
  }
}

}  // namespace hydra
