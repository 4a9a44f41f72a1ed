#include "csrc/pytorch/gradients/gradient_sink.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>

#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/parameters/withheld.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

namespace autograd = torch::autograd;

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && a.sizes() == b.sizes() && a.strides() == b.strides();
}

}  // namespace

// ---- transfers under way --------------------------------------------------------------------------------------------
void LeavingGradients::add(TicketPtr ticket, HostParameter& parameter, bool first) {
  const std::lock_guard lock(mutex_);
  statistics_.leaving += ticket->bytes();
  leaving_.push_back({std::move(ticket), &parameter, first});
}

void LeavingGradients::count(Bytes bytes, bool synchronous) {
  const std::lock_guard lock(mutex_);
  statistics_.bytes += bytes;
  ++statistics_.gradients;
  statistics_.synchronous += synchronous ? 1 : 0;
}

Bytes LeavingGradients::bytes() const {
  const std::lock_guard lock(mutex_);
  return statistics_.leaving;
}

bool LeavingGradients::has_any_of(const std::vector<HostParameter*>& parameters) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(leaving_.begin(), leaving_.end(), [&](const Leaving& leaving) {
    return std::find(parameters.begin(), parameters.end(), leaving.parameter) != parameters.end();
  });
}

void LeavingGradients::wait_for(const Leaving& leaving) noexcept {
  if (!leaving.ticket->finished()) {
    const ActivityRange range(backend_.activity(), ActivityRow::kCompute, ActivityKind::kWaitForGradients,
                              {.block = leaving.parameter->page->block, .part = leaving.parameter->name});
    const Stall stall(backend_.stalls());
    leaving.ticket->wait_quietly();
  }
}

bool LeavingGradients::wait_for_oldest() {
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
  at::Tensor failed;  // destroyed without the lock, since Python may refer to it
  const std::lock_guard lock(mutex_);
  statistics_.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (leaving_.empty() || leaving_.front().ticket != oldest.ticket) {
    return true;  // another thread waited for it too and has removed it
  }
  leaving_.pop_front();
  statistics_.leaving -= oldest.ticket->bytes();
  if (std::exception_ptr error = oldest.ticket->error()) {
    error_ = error_ ? error_ : error;
    if (oldest.first) {
      // A gradient must not have bytes that did not arrive.
      failed = std::exchange(oldest.parameter->host.unsafeGetTensorImpl()->mutable_grad(), at::Tensor());
    }
  }
  return true;
}

void LeavingGradients::throw_error() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

GradientStatistics LeavingGradients::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

// ---- sums -----------------------------------------------------------------------------------------------------------
AccumulatingSink::AccumulatingSink(DeviceBackend& backend, std::shared_ptr<HostArena> arena)
    : backend_(backend), arena_(std::move(arena)), leaving_(backend), ring_(arena_, backend.to_host().in_flight()) {}

AccumulatingSink::~AccumulatingSink() {
  const ReleaseGilIfHeld released;
  backend_.to_host().drain();
}

void AccumulatingSink::accept(HostParameter& parameter, at::Tensor gradient) {
  const std::lock_guard accepting(accepting_);
  const at::Tensor& sum = parameter.host.unsafeGetTensorImpl()->grad();
  fetch(sum);
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
  fetch(parameter.host.unsafeGetTensorImpl()->grad());
  norm_.expect(parameter);
  accept_synchronously(parameter, gradient);
  note_hooks(parameter, /*hold=*/true);
}

void AccumulatingSink::fetch(const at::Tensor& sum) const {
  if (fetch_ && sum.defined() && withheld_of(sum)) {
    fetch_(sum);
  }
}

void AccumulatingSink::between_gradients(const std::function<void()>& work) {
  const std::lock_guard accepting(accepting_);
  work();
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
    const Stall stall(backend_.stalls());  // no later step makes this memory
    sum = parameter.gradient_buffer(gradient, arena_);
  }
  leaving_.count(bytes, /*synchronous=*/false);
  if (direct) {
    copy_home(parameter, gradient, sum, std::move(arrival));
  } else {
    add_home(parameter, gradient, sum, first, std::move(arrival));
  }
  gradient = at::Tensor();
  while (bound_ > 0 && leaving_.bytes() > bound_ && relieve()) {
  }
}

void AccumulatingSink::copy_home(HostParameter& parameter, const at::Tensor& gradient, const at::Tensor& sum,
                                 LeavingNorm::Arrival arrival) {
  Job job;
  job.segments.push_back({sum.mutable_data_ptr(), gradient.const_data_ptr(), static_cast<Bytes>(gradient.nbytes())});
  job.after = [gradient, sum, arrival = std::move(arrival)] {
    if (arrival) {
      arrival(sum);
    }
  };
  submit(parameter, std::move(job), /*first=*/true);
}

void AccumulatingSink::add_home(HostParameter& parameter, const at::Tensor& gradient, const at::Tensor& sum, bool first,
                                LeavingNorm::Arrival arrival) {
  if (!first) {
    sum.unsafeGetTensorImpl()->bump_version();  // for all pieces, as one addition would
  }
  // Both have the same layout, without gaps: equal ranges of their memory have the same elements.
  const std::int64_t count = gradient.numel();
  const auto itemsize = static_cast<Bytes>(gradient.itemsize());
  const std::int64_t step = LandingRing::kPieceBytes / itemsize;
  const auto* const source = static_cast<const std::byte*>(gradient.const_data_ptr());
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const std::int64_t length = std::min(step, count - begin);
    const bool last = begin + length == count;
    const ArenaRegionPtr piece = ring_.next();
    Job job;
    job.segments.push_back({piece->data(), source + begin * itemsize, length * itemsize});
    job.after = [this, gradient, sum, piece, begin, length, first, arrival = last ? arrival : LeavingNorm::Arrival()] {
      auto* const total = static_cast<std::byte*>(sum.mutable_data_ptr());
      const HostNumbers part{total + begin * static_cast<Bytes>(sum.itemsize()), sum.scalar_type()};
      const HostNumbers landed{piece->data(), gradient.scalar_type()};
      if (first) {
        arithmetic_.convert(part, landed, length);
      } else {
        arithmetic_.add(part, landed, length);
      }
      if (arrival) {
        arrival(sum);
      }
    };
    // If one of several chunks fails, the whole sum is dropped.
    submit(parameter, std::move(job), first || length < count);
  }
}

void AccumulatingSink::submit(HostParameter& parameter, Job job, bool first) {
  job.priority = Priority::kGradient;
  job.label = {.block = parameter.page->block, .part = parameter.name};
  job.fences = {backend_.record()};
  TicketPtr ticket = backend_.to_host().submit(std::move(job));
  leaving_.add(std::move(ticket), parameter, first);
}

void AccumulatingSink::accept_synchronously(HostParameter& parameter, const at::Tensor& gradient) {
  drain();
  const Activity::Time begin = backend_.activity().now();
  const HostScope on_the_host;
  // If the gradient has a graph of its own, the copy and the sum become part of it.
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
  leaving_.count(bytes, /*synchronous=*/true);
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
    hooked_.erase(known);  // hooks run in the order in which the last parts arrived
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
  const HostScope on_the_host;  // tensors that a hook makes, such as optimizer state, belong to the host
  for (const Hooked& one : hooked) {
    if (const auto& hook = autograd::impl::post_acc_grad_hooks(one.parameter->host)) {
      norm_.forget();  // it may write any gradient, and not every write shows
      (*hook)(one.parameter->host);
    }
  }
}

void AccumulatingSink::drain() {
  while (relieve()) {
  }
  leaving_.throw_error();
}

void AccumulatingSink::bring_home(const std::vector<HostParameter*>& parameters) {
  while (leaving_.has_any_of(parameters)) {
    relieve();
  }
  leaving_.throw_error();
}

}  // namespace hydra
