// Sinks take gradients that leave the device.
//
// A hook on every trainable face hands its gradient over as soon as autograd has summed it, on the thread that runs
// backward and without the interpreter lock. AccumulatingSink brings it to the host parameter's `.grad`, in the order
// and dtype of plain accumulation. Another GradientSink could take its place.
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
#include "csrc/pytorch/memory/host_arithmetic.h"
#include "csrc/pytorch/memory/landing_ring.h"
#include "csrc/pytorch/parameters/host_parameter.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

class GradientSink {
 public:
  virtual ~GradientSink() = default;
  /// Takes the gradient. The device may read it until the sink's transfer of it has ended.
  virtual void accept(HostParameter& parameter, at::Tensor gradient) = 0;
  /// Takes the gradient of a loss that was computed on the host parameter itself. It is not read after the call.
  virtual void accept_from_host(HostParameter& parameter, const at::Tensor& gradient) = 0;
  /// Waits for the oldest gradient on its way out, and frees it. Returns false if there is none.
  virtual bool relieve() = 0;
  /// Blocks until every accepted gradient is home. Throws the first error.
  virtual void drain() = 0;
};

struct GradientStatistics {
  Bytes bytes = 0;    // as they crossed the lane
  Bytes leaving = 0;  // of transfers that were not waited for yet
  std::int64_t gradients = 0;
  std::int64_t synchronous = 0;  // took the slow way: sparse, strided, or with a graph of their own
  double wait_seconds = 0.0;
};

/// The gradients on their way from the device to the host, oldest first, and the first error of their transfers.
/// Threads: any; one mutex, under which no thread waits.
class LeavingGradients final {
 public:
  explicit LeavingGradients(DeviceBackend& backend) : backend_(backend) {}

  /// Adds a transfer. `first`: the parameter's `.grad` is not valid unless it succeeds.
  void add(TicketPtr ticket, HostParameter& parameter, bool first);
  /// Counts a gradient. It has one transfer or several, or none if it is `synchronous`.
  void count(Bytes bytes, bool synchronous);
  /// The bytes of the transfers under way.
  Bytes bytes() const;
  bool has_any_of(const std::vector<HostParameter*>& parameters) const;
  /// Waits for the oldest transfer, and keeps its error. Returns false if there is none.
  bool wait_for_oldest();
  /// Throws the first error since the last call, if there was one.
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
  std::exception_ptr error_;
  GradientStatistics statistics_;
};

/// Copies gradients to the host parameter's `.grad`, or adds them to it.
class AccumulatingSink final : public GradientSink {
 public:
  AccumulatingSink(DeviceBackend& backend, std::shared_ptr<HostArena> arena);
  ~AccumulatingSink() override;

  /// Sets the dtype in which gradients cross the lane; by default their own.
  void set_transfer_dtype(std::optional<at::ScalarType> dtype) { transfer_dtype_ = dtype; }
  /// Sets the most bytes on their way at once; 0, the default, leaves only the budget as a bound.
  void set_bound(Bytes bytes) noexcept { bound_ = bytes; }

  /// Calls `fetch` before a gradient is added to a `.grad` whose bytes are withheld: it brings them to the host.
  void set_fetch(std::function<void(const at::Tensor&)> fetch) { fetch_ = std::move(fetch); }
  /// Calls `work` while no gradient is being accepted.
  void between_gradients(const std::function<void()>& work);

  void accept(HostParameter& parameter, at::Tensor gradient) override;
  void accept_from_host(HostParameter& parameter, const at::Tensor& gradient) override;
  bool relieve() override { return leaving_.wait_for_oldest(); }
  void drain() override;
  /// Blocks until the gradients of these parameters are home. Throws the first error, even that of another parameter.
  void bring_home(const std::vector<HostParameter*>& parameters);
  /// Runs the post-accumulate hooks of the host parameters that have got gradients since the last call. If the backward
  /// has `failed`, skips them. Called once per backward, because a parameter may get its gradient in several parts:
  /// from its face, and from a loss on the parameter itself.
  void run_hooks(bool failed);
  GradientStatistics statistics() const { return leaving_.statistics(); }
  /// The norm that every gradient enters when it comes home.
  LeavingNorm& norm() noexcept { return norm_; }

 private:
  /// A parameter whose hooks are to run.
  struct Hooked {
    HostParameter* parameter = nullptr;
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> held;  // taken away, so that autograd does not run it too
  };

  void fetch(const at::Tensor& sum) const;
  void accept_on_lane(HostParameter& parameter, at::Tensor gradient, LeavingNorm::Arrival arrival);
  void accept_synchronously(HostParameter& parameter, const at::Tensor& gradient);
  /// Submits one job that copies the bytes to `sum`.
  void copy_home(HostParameter& parameter, const at::Tensor& gradient, const at::Tensor& sum,
                 LeavingNorm::Arrival arrival);
  /// Submits jobs that each bring a chunk to the ring and add it to `sum`. If `first`, they convert it into `sum`
  /// instead.
  void add_home(HostParameter& parameter, const at::Tensor& gradient, const at::Tensor& sum, bool first,
                LeavingNorm::Arrival arrival);
  void submit(HostParameter& parameter, Job job, bool first);
  void note_hooks(HostParameter& parameter, bool hold);

  DeviceBackend& backend_;
  std::shared_ptr<HostArena> arena_;
  std::optional<at::ScalarType> transfer_dtype_;
  Bytes bound_ = 0;
  std::function<void(const at::Tensor&)> fetch_;
  std::mutex accepting_;  // a parameter's face and the parameter itself may get gradients on two threads
  std::vector<Hooked> hooked_;
  LeavingGradients leaving_;
  LandingRing ring_;
  HostArithmetic arithmetic_;  // of the lane's jobs
  LeavingNorm norm_;
};

}  // namespace hydra
