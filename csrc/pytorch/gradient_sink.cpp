#include "csrc/pytorch/gradient_sink.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <c10/util/ParallelGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>

#include "csrc/base/errors.h"
#include "csrc/pytorch/counting_allocator.h"
#include "csrc/pytorch/device_homes.h"
#include "csrc/pytorch/error_bridge.h"
#include "csrc/pytorch/gil.h"
#include "csrc/pytorch/gradient_gathering.h"

namespace hydra {

namespace {

namespace autograd = torch::autograd;

/// Throws when somebody has taken the gradient for complete.
void note_arrival(HostParameter& parameter) {
  try {
    HYDRA_EXPECT(parameter.gradient_state != GradientState::kSettled, StateError,
                 "the gradient of '" + parameter.name +
                     "' was averaged over the ranks, and then backward brought more of it. A backward inside the "
                     "backward is not foreseen there, but by torch.utils.checkpoint");
  } catch (const Error&) {
    rethrow_for_torch({});
  }
  parameter.gradient_state = GradientState::kArrived;
}

class HandOver final : public autograd::PostAccumulateGradHook {
 public:
  HandOver(HostParameter& parameter, GradientSink& sink, GradientGathering& gathering, DeviceHomes& homes,
           std::function<bool()> active)
      : parameter_(parameter), sink_(sink), gathering_(gathering), homes_(homes), active_(std::move(active)) {}

  void operator()(const autograd::Variable& face) override {
    note_arrival(parameter_);
    if (stays()) {
      return;
    }
    at::Tensor& slot = face.unsafeGetTensorImpl()->mutable_grad();
    at::Tensor gradient = std::move(slot);
    slot = at::Tensor();
    if (gradient.defined()) {
      const ReleaseGilIfHeld released;
      try {
        sink_.accept(parameter_, std::move(gradient));
        if (!active_()) {
          sink_.drain();
        }
      } catch (const Error&) {
        rethrow_for_torch({});
      }
    }
  }

 private:
  bool stays() {
    const ReleaseGilIfHeld released;
    try {
      return homes_.keep_gradient(parameter_) || gathering_.keep(parameter_);
    } catch (const Error&) {
      rethrow_for_torch({});
    }
  }

  HostParameter& parameter_;
  GradientSink& sink_;
  GradientGathering& gathering_;
  DeviceHomes& homes_;
  std::function<bool()> active_;
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

/// Before the node that sums into the host parameter: hands the gradient over and leaves the node nothing to sum.
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

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && a.sizes() == b.sizes() && a.strides() == b.strides();
}

}  // namespace

void install_gradient_hooks(HostParameter& parameter, GradientSink& sink, GradientGathering& gathering,
                            DeviceHomes& homes, std::function<bool()> active) {
  autograd::impl::add_hook(parameter.face, std::make_unique<HostHooks>(parameter));
  autograd::impl::set_post_acc_grad_hooks(
      parameter.face, std::make_unique<HandOver>(parameter, sink, gathering, homes, std::move(active)));
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

AccumulatingSink::AccumulatingSink(DeviceBackend& backend, std::shared_ptr<HostArena> arena)
    : backend_(backend), arena_(std::move(arena)) {}

AccumulatingSink::~AccumulatingSink() {
  const ReleaseGilIfHeld released;
  backend_.to_host().drain();
}

void AccumulatingSink::accept(HostParameter& parameter, at::Tensor gradient) {
  const std::lock_guard accepting(accepting_);
  const at::Tensor& sum = parameter.host.unsafeGetTensorImpl()->grad();
  const bool plain = gradient.layout() == at::kStrided && gradient.numel() > 0 && !gradient.requires_grad() &&
                     gradient.is_non_overlapping_and_dense() && gradient.device() == parameter.face.device();
  const bool fits = !sum.defined() || (same_layout(sum, gradient) && !sum.requires_grad());
  LeavingNorm::Arrival arrival = norm_.expect(parameter);
  if (plain && fits) {
    accept_on_lane(parameter, std::move(gradient), std::move(arrival));
  } else {
    accept_synchronously(parameter, gradient);
  }
  note_hooks(parameter, /*hold=*/false);
}

void AccumulatingSink::accept_from_host(HostParameter& parameter, const at::Tensor& gradient) {
  const std::lock_guard accepting(accepting_);
  norm_.expect(parameter);
  accept_synchronously(parameter, gradient);
  note_hooks(parameter, /*hold=*/true);
}

void AccumulatingSink::accept_on_lane(HostParameter& parameter, at::Tensor gradient, LeavingNorm::Arrival arrival) {
  if (transfer_dtype_ && gradient.is_floating_point() && gradient.scalar_type() != *transfer_dtype_) {
    const at::NoGradGuard no_grad;
    gradient = gradient.to(*transfer_dtype_);
  }
  const auto bytes = static_cast<Bytes>(gradient.nbytes());
  reclassify(gradient.storage().data(), MemoryClass::kGradients);
  backend_.note_write(gradient.mutable_data_ptr(), bytes);

  at::Tensor& sum = parameter.host.unsafeGetTensorImpl()->mutable_grad();
  const bool first = !sum.defined();
  const bool direct = first && gradient.scalar_type() == parameter.host.scalar_type();
  if (first) {
    sum = parameter.gradient_buffer(gradient, arena_);
  }
  Job job;
  job.priority = Priority::kGradient;
  job.label = {.block = parameter.page->block, .part = parameter.name};
  job.fences = {backend_.record()};
  at::Tensor landing = direct ? sum : staging_like(gradient);
  job.segments.push_back({landing.mutable_data_ptr(), gradient.const_data_ptr(), bytes});
  job.after = [gradient, landing, sum, first, direct, arrival = std::move(arrival)]() mutable {
    if (!direct) {
      const at::NoGradGuard no_grad;
      const HostScope on_the_host;
      const c10::ParallelGuard one_thread(true);
      if (first) {
        sum.copy_(landing);
      } else {
        sum.add_(landing.scalar_type() == sum.scalar_type() ? landing : landing.to(sum.scalar_type()));
      }
    }
    if (arrival) {
      arrival(sum);
    }
  };
  gradient = at::Tensor();
  landing = at::Tensor();
  TicketPtr ticket = backend_.to_host().submit(std::move(job));
  Bytes under_way = 0;
  {
    const std::lock_guard lock(mutex_);
    leaving_.push_back({std::move(ticket), &parameter, first});
    leaving_bytes_ += bytes;
    under_way = leaving_bytes_;
    statistics_.bytes += bytes;
    ++statistics_.gradients;
  }
  while (bound_ > 0 && under_way > bound_ && relieve()) {
    const std::lock_guard lock(mutex_);
    under_way = leaving_bytes_;
  }
}

void AccumulatingSink::accept_synchronously(HostParameter& parameter, const at::Tensor& gradient) {
  drain();
  if (FencePtr fence = backend_.record()) {
    fence->wait();
  }
  const Activity::Time begin = backend_.activity().now();
  const HostScope on_the_host;
  // With a graph of its own the copy belongs to the graph, as the sum does.
  at::Tensor copy = gradient.to(gradient.options().device(at::kCPU).dtype(parameter.host.scalar_type()),
                                /*non_blocking=*/false, /*copy=*/true);
  at::Tensor& sum = parameter.host.unsafeGetTensorImpl()->mutable_grad();
  if (!sum.defined()) {
    sum = copy;
  } else if (at::GradMode::is_enabled() || sum.requires_grad() || sum.layout() != copy.layout()) {
    sum = at::add(sum, copy);
  } else {
    sum.add_(copy);
  }
  const Bytes bytes = gradient.layout() == at::kStrided ? static_cast<Bytes>(gradient.nbytes()) : 0;
  backend_.activity().add_since(begin, ActivityRow::kToHost, ActivityKind::kCopy,
                                {.block = parameter.page->block, .part = parameter.name}, bytes);
  const std::lock_guard lock(mutex_);
  statistics_.bytes += bytes;
  ++statistics_.gradients;
  ++statistics_.synchronous;
}

at::Tensor AccumulatingSink::staging_like(const at::Tensor& gradient) {
  const auto bytes = static_cast<Bytes>(gradient.nbytes());
  c10::Storage storage;
  {
    const std::lock_guard lock(mutex_);
    for (const c10::Storage& candidate : staging_) {
      if (candidate.use_count() == 1 && candidate.nbytes() == gradient.nbytes()) {
        storage = candidate;
        break;
      }
    }
    if (!storage) {
      storage = storage_in(std::make_shared<ArenaRegion>(arena_, bytes), 0, bytes);
      staging_.push_back(storage);
    }
  }
  at::Tensor staging = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), gradient.dtype());
  staging.unsafeGetTensorImpl()->set_sizes_and_strides(gradient.sizes(), gradient.strides());
  return staging;
}

void AccumulatingSink::note_hooks(HostParameter& parameter, bool hold) {
  auto& hook = autograd::impl::post_acc_grad_hooks(parameter.host);
  const auto known = std::find_if(hooked_.begin(), hooked_.end(),
                                  [&](const Hooked& hooked) { return hooked.parameter == &parameter; });
  if (!hook && known == hooked_.end()) {
    return;
  }
  Hooked noted{&parameter, nullptr};
  if (known != hooked_.end()) {
    noted = std::move(*known);
    hooked_.erase(known);  // the order is that of the last parts
  }
  if (hold && hook) {
    noted.held = std::move(hook);
  }
  hooked_.push_back(std::move(noted));
}

void AccumulatingSink::run_hooks(bool failed) {
  std::vector<Hooked> hooked;
  {
    const std::lock_guard accepting(accepting_);
    hooked = std::exchange(hooked_, {});
  }
  for (Hooked& one : hooked) {
    if (one.held) {
      autograd::impl::post_acc_grad_hooks(one.parameter->host) = std::move(one.held);
    }
  }
  if (failed || hooked.empty()) {
    return;
  }
  drain();
  const HostScope on_the_host;  // what a hook makes, an optimizer's state say, is the host's
  for (const Hooked& one : hooked) {
    if (const auto& hook = autograd::impl::post_acc_grad_hooks(one.parameter->host)) {
      norm_.forget();  // it may write any gradient, and not every write shows
      (*hook)(one.parameter->host);
    }
  }
}

void AccumulatingSink::wait_for(const Leaving& leaving) noexcept {
  if (!leaving.ticket->finished()) {
    const ActivityRange range(backend_.activity(), ActivityRow::kCompute, ActivityKind::kWaitForGradients,
                              {.block = leaving.parameter->page->block, .part = leaving.parameter->name});
    leaving.ticket->wait_quietly();
  }
}

bool AccumulatingSink::relieve() {
  Leaving oldest;
  {
    const std::lock_guard lock(mutex_);
    if (leaving_.empty()) {
      return false;
    }
    oldest = leaving_.front();
  }
  const ReleaseGilIfHeld released;
  const auto start = std::chrono::steady_clock::now();
  wait_for(oldest);
  const std::lock_guard lock(mutex_);
  statistics_.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (leaving_.empty() || leaving_.front().ticket != oldest.ticket) {
    return true;  // another thread waited for it too and has counted it
  }
  leaving_.pop_front();
  leaving_bytes_ -= oldest.ticket->bytes();
  if (std::exception_ptr error = oldest.ticket->error()) {
    error_ = error_ ? error_ : error;
    if (oldest.first) {
      // Never leave bytes that did not arrive where a gradient is expected.
      oldest.parameter->host.unsafeGetTensorImpl()->mutable_grad() = at::Tensor();
    }
  }
  return true;
}

void AccumulatingSink::drain() {
  while (relieve()) {
  }
  throw_error();
}

void AccumulatingSink::bring_home(const std::vector<HostParameter*>& parameters) {
  const auto under_way = [&] {
    const std::lock_guard lock(mutex_);
    return std::any_of(leaving_.begin(), leaving_.end(), [&](const Leaving& leaving) {
      return std::find(parameters.begin(), parameters.end(), leaving.parameter) != parameters.end();
    });
  };
  while (under_way()) {
    relieve();
  }
  throw_error();
}

void AccumulatingSink::throw_error() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

GradientStatistics AccumulatingSink::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace hydra
