// The squares of a step's gradients, summed while other gradients are still on their way to the host.
//
// From begin() on the gradients that a sink brings home are taken to be the step's last; each one's squares are summed
// as soon as nothing more is to come for it. A sum stands for `.grad` only while that is what arrived: the same memory,
// or what was made of it on the disk, in the same version, laid out as the parameter is. A write that shows in neither
// has to be told of by forget().
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
  /// To be called with `.grad` once the bytes are there; empty when no sum is wanted.
  using Arrival = std::function<void(const at::Tensor&)>;

  void begin(std::shared_ptr<ThreadPool> pool);
  /// What is known is void; later gradients are summed again.
  void forget();
  /// What is known is void, and nothing is summed any more. Returns when no gradient is being read.
  void end();

  /// A gradient of the parameter is about to be written. Returns once no earlier one is being read.
  Arrival expect(const HostParameter& parameter);
  /// As far as is known, those written so far get nothing more.
  void release();
  /// As that, and blocks until they have been read: their bytes may leave, and their sums stand.
  void finish();
  /// Whether it holds on to the storage of the parameter's gradient.
  bool holds(const HostParameter& parameter) const;

  /// Ends; the sums of those host parameters whose gradient is what arrived. Waits for what is under way.
  std::vector<std::optional<double>> take(const std::vector<at::Tensor>& hosts);
  /// How many sums were taken, since there is this object.
  std::int64_t taken() const;

 private:
  std::shared_ptr<NormAccumulator> accumulator() const;

  mutable std::mutex mutex_;
  std::shared_ptr<NormAccumulator> accumulator_;
  std::int64_t taken_ = 0;
};

}  // namespace hydra
