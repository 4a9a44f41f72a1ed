// Where gradients go when they leave the device.
//
// A hook on every trainable face hands its gradient over as soon as autograd has summed it, on the thread
// that runs backward and without the interpreter lock. The sink here brings it to the host parameter's
// `.grad`, in the order and dtype of plain accumulation; an optimizer that wants gradients itself can take
// the sink's place.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/pytorch/gradients/leaving_norm.h"
#include "csrc/pytorch/memory/account.h"
#include "csrc/pytorch/memory/landing_ring.h"
#include "csrc/pytorch/parameters/host_parameter.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

class GradientSink {
 public:
  virtual ~GradientSink() = default;
  /// Takes the gradient. It may be read by the device until the sink's own transfer of it has ended.
  virtual void accept(HostParameter& parameter, at::Tensor gradient) = 0;
  /// Takes what a loss computed on the host parameter itself adds to its gradient; not read after the call.
  virtual void accept_from_host(HostParameter& parameter, const at::Tensor& gradient) = 0;
  /// Frees the oldest gradient on its way out, waiting for it. False when there is none.
  virtual bool relieve() = 0;
  /// Blocks until every accepted gradient is home. Throws the first error.
  virtual void drain() = 0;
};

struct GradientStatistics {
  Bytes bytes = 0;  // as they crossed the lane
  std::int64_t gradients = 0;
  std::int64_t synchronous = 0;  // went the slow way: sparse, strided, or with a graph of their own
  double wait_seconds = 0.0;
};

/// Gradients on their way from the device to the host, the oldest first, and what went wrong on that way. Any thread;
/// one mutex, which nothing waits under.
class LeavingGradients final {
 public:
  explicit LeavingGradients(DeviceBackend& backend) : backend_(backend) {}

  /// One more transfer. Until that of the `first` bytes has ended the parameter's `.grad` has no valid ones.
  void add(TicketPtr ticket, HostParameter& parameter, bool first);
  /// A gradient, which is one transfer or several, or none if it is `synchronous`.
  void count(Bytes bytes, bool synchronous);
  Bytes bytes() const;
  bool has_any_of(const std::vector<HostParameter*>& parameters) const;
  /// Waits for the oldest transfer, and keeps its error. False when there is none.
  bool wait_for_oldest();
  /// The first error since the last call.
  void throw_error();
  GradientStatistics statistics() const;

 private:
  struct Leaving {
    TicketPtr ticket;
    HostParameter* parameter = nullptr;
    bool first = false;
  };
  void wait_for(const Leaving& leaving) noexcept;

  DeviceBackend& backend_;
  mutable std::mutex mutex_;
  std::deque<Leaving> leaving_;
  Bytes bytes_ = 0;
  std::exception_ptr error_;
  GradientStatistics statistics_;
};

/// Copies to, or adds into, the host parameter's `.grad`.
class AccumulatingSink final : public GradientSink {
 public:
  AccumulatingSink(DeviceBackend& backend, std::shared_ptr<HostArena> arena);
  ~AccumulatingSink() override;

  /// Gradients cross the lane in this dtype; their own unless set.
  void set_transfer_dtype(std::optional<at::ScalarType> dtype) { transfer_dtype_ = dtype; }
  /// At most this many bytes are on their way at once; without a bound, as many as the budget holds.
  void set_bound(Bytes bytes) noexcept { bound_ = bytes; }

  /// Asked before something is added to a `.grad` whose bytes are withheld: brings them to the host.
  void set_fetch(std::function<void(const at::Tensor&)> fetch) { fetch_ = std::move(fetch); }
  /// What is done while no gradient is accepted.
  void between_gradients(const std::function<void()>& work);

  void accept(HostParameter& parameter, at::Tensor gradient) override;
  void accept_from_host(HostParameter& parameter, const at::Tensor& gradient) override;
  bool relieve() override { return leaving_.wait_for_oldest(); }
  void drain() override;
  /// Blocks until the gradients of these parameters are home. Throws the first error, whosever it is.
  void bring_home(const std::vector<HostParameter*>& parameters);
  /// Runs the post-accumulate hooks of the host parameters that have got gradients since the last call; just forgets
  /// them after a backward that failed. Once per backward: a parameter may get its gradient in several parts, from its
  /// face and from a loss on the parameter itself.
  void run_hooks(bool failed);
  GradientStatistics statistics() const { return leaving_.statistics(); }
  /// Told of every gradient that comes home.
  LeavingNorm& norm() noexcept { return norm_; }

 private:
  /// A parameter whose hooks are to run.
  struct Hooked {
    HostParameter* parameter = nullptr;
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> held;  // taken from it, lest autograd runs it too
  };

  void fetch(const at::Tensor& sum) const;
  void accept_on_lane(HostParameter& parameter, at::Tensor gradient, LeavingNorm::Arrival arrival);
  void accept_synchronously(HostParameter& parameter, const at::Tensor& gradient);
  /// One job that brings the bytes to `sum`.
  void copy_home(HostParameter& parameter, const at::Tensor& gradient, const at::Tensor& sum,
                 LeavingNorm::Arrival arrival);
  /// Jobs that bring a piece each to the ring and add it to `sum`, or, if it is the `first`, convert it.
  void add_home(HostParameter& parameter, const at::Tensor& gradient, const at::Tensor& sum, bool first,
                LeavingNorm::Arrival arrival);
  void submit(HostParameter& parameter, Job job, bool first);
  void note_hooks(HostParameter& parameter, bool hold);

  DeviceBackend& backend_;
  std::shared_ptr<HostArena> arena_;
  std::optional<at::ScalarType> transfer_dtype_;
  Bytes bound_ = 0;
  std::function<void(const at::Tensor&)> fetch_;
  std::mutex accepting_;  // a parameter's face and the parameter itself may get gradients in two threads
  std::vector<Hooked> hooked_;
  LeavingGradients leaving_;
  LandingRing ring_;
  LeavingNorm norm_;
};

}  // namespace hydra
