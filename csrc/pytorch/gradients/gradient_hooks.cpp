#include "csrc/pytorch/gradients/gradient_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/gradients/gradient_gathering.h"
#include "csrc/pytorch/homes/block_homes.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

namespace autograd = torch::autograd;

/// Notes that backward brings a gradient. Throws if the parameter's gradient was declared complete.
void note_arrival(HostParameter& parameter) {
  try {
    HYDRA_EXPECT(parameter.gradient_state != GradientState::kSettled, StateError,
                 "the gradient of '" + parameter.name +
                     "' was averaged over the ranks, and then backward brought more of it. With several ranks, a "
                     "backward inside the backward is supported only for torch.utils.checkpoint");
  } catch (const Error&) {
    rethrow_for_torch({});
  }
  parameter.gradient_state = GradientState::kArrived;
}

class HandOver final : public autograd::PostAccumulateGradHook {
 public:
  HandOver(HostParameter& parameter, GradientSink& sink, GradientGathering& gathering, BlockHomes& homes,
           std::function<bool()> active, std::function<void()> summed)
      : parameter_(parameter),
        sink_(sink),
        gathering_(gathering),
        homes_(homes),
        active_(std::move(active)),
        summed_(std::move(summed)) {}

  void operator()(const autograd::Variable& face) override {
    note_arrival(parameter_);
    const ReleaseGilIfHeld released;
    try {
      summed_();  // first: the block may make room for what follows
      at::Tensor& slot = face.unsafeGetTensorImpl()->mutable_grad();
      const bool settled = homes_.home_of(parameter_.page->block) == Home::kDevice;
      if (!slot.defined() || (settled ? gathering_.keep_early(parameter_) : gathering_.keep(parameter_))) {
        return;
      }
      at::Tensor gradient = std::exchange(slot, at::Tensor());
      if (homes_.device().keep_gradient(parameter_, gradient)) {
        return;
      }
      sink_.accept(parameter_, std::move(gradient));
      if (!active_()) {
        sink_.drain();
      }
    } catch (const Error&) {
      rethrow_for_torch({});
    }
  }

 private:
  HostParameter& parameter_;
  GradientSink& sink_;
  GradientGathering& gathering_;
  BlockHomes& homes_;
  std::function<bool()> active_;
  std::function<void()> summed_;
};

/// Runs the hooks that users registered on the host parameter, as autograd would.
class HostHooks final : public autograd::FunctionPreHook {
 public:
  explicit HostHooks(HostParameter& parameter) : parameter_(parameter) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    autograd::variable_list values = gradients;
    for (const auto& hook : autograd::impl::hooks(parameter_.host)) {
      values = (*hook)(values);
    }
    return values;
  }

 private:
  HostParameter& parameter_;
};

/// Runs before the node that sums into the host parameter: hands the gradient over and leaves the node nothing to sum.
class Diversion final : public autograd::FunctionPreHook {
 public:
  Diversion(HostParameter& parameter, GradientSink& sink, std::function<bool()> active)
      : parameter_(parameter), sink_(sink), active_(std::move(active)) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    if (gradients.empty() || !gradients[0].defined() || !active_()) {
      return gradients;
    }
    note_arrival(parameter_);
    const ReleaseGilIfHeld released;
    try {
      sink_.accept_from_host(parameter_, gradients[0]);
    } catch (const Error&) {
      rethrow_for_torch({});
    }
    return {at::Tensor()};
  }

 private:
  HostParameter& parameter_;
  GradientSink& sink_;
  std::function<bool()> active_;
};

}  // namespace

void install_gradient_hooks(HostParameter& parameter, GradientSink& sink, GradientGathering& gathering,
                            BlockHomes& homes, std::function<bool()> active, std::function<void()> summed) {
  autograd::impl::add_hook(parameter.face, std::make_unique<HostHooks>(parameter));
  autograd::impl::set_post_acc_grad_hooks(
      parameter.face,
      std::make_unique<HandOver>(parameter, sink, gathering, homes, std::move(active), std::move(summed)));
}

void clear_gradient_hooks(HostParameter& parameter) {
  autograd::impl::clear_hooks(parameter.face);
  autograd::impl::set_post_acc_grad_hooks(parameter.face, nullptr);
}

std::shared_ptr<void> divert_host_gradients(HostParameter& parameter, GradientSink& sink,
                                            std::function<bool()> active) {
  const auto node = autograd::impl::grad_accumulator(parameter.host);
  auto hook = std::make_unique<Diversion>(parameter, sink, std::move(active));
  Diversion* const known = hook.get();
  node->add_pre_hook(std::move(hook));
  return {known, [node](const Diversion* mine) {
            std::erase_if(node->pre_hooks(), [mine](const auto& other) { return other.get() == mine; });
          }};
}

}  // namespace hydra
