#include "csrc/pytorch/model/gradient_path.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "csrc/pytorch/gradients/gradient_hooks.h"
#include "csrc/pytorch/memory/counting_allocator.h"

namespace hydra {

GradientPath::GradientPath(DeviceBackend& backend, std::shared_ptr<HostArena> arena, ModelBlocks& blocks,
                           BlockHomes& homes, WindowGate& gate, std::optional<at::ScalarType> transfer_dtype,
                           Bytes bound)
    : backend_(backend),
      blocks_(blocks),
      homes_(homes),
      gate_(gate),
      narrows_(transfer_dtype.has_value()),
      sink_(backend, std::move(arena)),
      spill_(blocks, homes.disk(), sink_) {
  sink_.set_transfer_dtype(transfer_dtype);
  sink_.set_bound(bound);
  sink_.set_fetch([&disk = homes.disk()](const at::Tensor& gradient) {
    if (disk.holds(gradient)) {
      disk.homes()->bring_home(withheld_of(gradient)->block, gradient.storage());
    }
  });
}

void GradientPath::install_hooks(HostParameter& parameter, std::function<void()> summed) {
  install_gradient_hooks(parameter, sink_, gathering_, homes_, [this] { return gate_.open(); }, std::move(summed));
}

void GradientPath::divert(HostParameter& parameter) {
  parameter.diversion = divert_host_gradients(parameter, sink_, [this] { return gate_.open(); });
}

void GradientPath::clear_hooks() {
  for (const auto& parameter : blocks_.parameters()) {
    clear_gradient_hooks(*parameter);
    parameter->diversion.reset();
  }
}

void GradientPath::begin_gathering() {
  if (!narrows_) {
    gathering_.begin();
  }
}

bool GradientPath::may_accumulate_early(const at::Tensor& leaf) const {
  const auto& parameters = blocks_.parameters();
  const auto known = std::find_if(parameters.begin(), parameters.end(),
                                  [&](const auto& parameter) { return parameter->face.is_same(leaf); });
  return known != parameters.end() && !narrows_ && gathering_.would_keep(**known);
}

void GradientPath::hand_over(HostParameter& parameter, at::Tensor gradient) {
  if (!homes_.device().keep_gradient(parameter, gradient)) {
    sink_.accept(parameter, std::move(gradient));
  }
}

void GradientPath::collect_assigned() {
  for (const auto& parameter : blocks_.parameters()) {
    at::Tensor& assigned = parameter->face.unsafeGetTensorImpl()->mutable_grad();
    if (assigned.defined()) {
      hand_over(*parameter, std::exchange(assigned, {}));
    }
  }
}

std::vector<at::Tensor> GradientPath::take_gathered(std::int32_t block) {
  std::vector<at::Tensor> taken;
  for (HostParameter* parameter : blocks_.parameters_of(block)) {
    const at::Tensor at_home = homes_.device().gradient(*parameter);
    taken.push_back(at_home.defined() ? at_home.clone() : gathering_.take(*parameter));
  }
  return taken;
}

void GradientPath::return_gathered(std::int32_t block, std::size_t index, at::Tensor gradient) {
  HostParameter& parameter = *blocks_.parameters_of(block).at(index);
  if (homes_.device().replace_gradient(parameter, gradient)) {
    return;
  }
  if (at::Tensor& host = parameter.host.unsafeGetTensorImpl()->mutable_grad(); host.defined()) {  // it is home now
    if (FencePtr fence = backend_.record()) {
      fence->wait();
    }
    const at::NoGradGuard no_grad;
    const HostScope on_the_host;
    host.copy_(gradient);
    return;
  }
  hand_over(parameter, std::move(gradient));
  if (!gate_.open()) {
    sink_.drain();
  }
}

std::vector<bool> GradientPath::finish(std::int32_t block) {
  const auto& parameters = blocks_.parameters_of(block);
  sink_.bring_home(parameters);
  const GradientState finished = gate_.open() ? GradientState::kSettled : GradientState::kUnchanged;
  std::vector<bool> arrived;
  for (HostParameter* parameter : parameters) {
    arrived.push_back(parameter->gradient_state.exchange(finished) == GradientState::kArrived);
  }
  return arrived;
}

void GradientPath::reopen() noexcept {
  for (const auto& parameter : blocks_.parameters()) {
    auto finished = GradientState::kSettled;
    parameter->gradient_state.compare_exchange_strong(finished, GradientState::kUnchanged);
  }
}

}  // namespace hydra
