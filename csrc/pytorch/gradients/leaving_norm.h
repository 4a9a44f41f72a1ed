// Sums the squares of a step's gradients while other gradients are still on their way to the host.
//
// From begin() on, the gradients that a sink brings home are taken for the last of the step. A gradient's squares are
// summed as soon as nothing more will be added to it. The sum is valid only while `.grad` is the gradient that arrived:
// the same memory, or its copy on the disk, in the same version, with the layout of the parameter. A caller that writes
// without a trace in either has to call forget().
//
// Threads: any, without the interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/optim/norm_accumulator.h"
#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra {

class LeavingNorm {
 public:
  /// Called with `.grad` once its bytes have arrived; empty if no sum is wanted.
  using Arrival = std::function<void(const at::Tensor&)>;

  void begin(std::shared_ptr<ThreadPool> pool);
  /// Discards all sums. Gradients that arrive later are summed again.
  void forget();
  /// Discards all sums, and ends the summing. Returns when no gradient is being read.
  void end();

  /// Announces that a gradient of the parameter will be written. Returns once no earlier one is being read.
  Arrival expect(const HostParameter& parameter);
  /// Tells that, as far as is known, nothing more will be added to the gradients written so far.
  void release();
  /// Does the same, and blocks until these gradients have been read. Then their bytes may leave; their sums stay valid.
  void finish();
  /// Whether this object owns a reference to the storage of the parameter's gradient.
  bool holds(const HostParameter& parameter) const;

  /// Ends the summing. Returns the sums of those host parameters whose gradient is still the one that arrived. Waits
  /// for sums under way.
  std::vector<std::optional<double>> take(const std::vector<at::Tensor>& hosts);
  /// The number of sums that take() has returned so far.
  std::int64_t taken() const;

 private:
  std::shared_ptr<NormAccumulator> accumulator() const;

  mutable std::mutex mutex_;
  std::shared_ptr<NormAccumulator> accumulator_;
  std::int64_t taken_ = 0;
};

}  // namespace hydra
