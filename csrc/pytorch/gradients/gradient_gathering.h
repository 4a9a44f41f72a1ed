// Keeps gradients on the device while several microbatches add to them.
//
// In a round the microbatches pass a block's backward one after another, so that the block's gradient need leave only
// once. It may stay if the result has the same bits: the host has no gradient yet, its sum would have the same dtype,
// and no hook observes the host's sum.
//
// Gradients that a round gathers early, before all of its forwards have ended, are carried over to its backward, or
// dropped without a trace.
// Threads: any; those that run backward call keep(). Only the round's thread uses carried gradients.
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra {

class GradientGathering {
 public:
  using HandOver = std::function<void(HostParameter&, at::Tensor)>;

  void begin();
  /// Keeps every gradient until carry().
  void begin_early();
  /// Whether a gradient of this parameter could stay.
  bool would_keep(const HostParameter& parameter) const;
  /// Takes the gradients that stayed from the faces, and keeps them until the next end(). begin() and discard() do not
  /// affect them.
  void carry();
  void drop_carried() noexcept;
  /// Decides about a gradient that the face of `parameter` has got. Returns true if it stays there.
  bool keep(HostParameter& parameter);
  /// Does the same between begin_early() and carry(); otherwise returns false.
  bool keep_early(HostParameter& parameter);
  /// Takes the gradient of `parameter` if it has stayed and is the whole gradient; otherwise returns an undefined
  /// tensor.
  at::Tensor take(HostParameter& parameter);
  /// Hands over all gradients that stayed or were carried; none stays from now on. Returns their bytes.
  Bytes end(const HandOver& hand_over);
  /// Drops the gradients that stayed, because the pass has failed.
  void discard() noexcept;

 private:
  std::vector<HostParameter*> take_all();

  std::mutex mutex_;
  bool active_ = false;
  bool early_ = false;
  std::vector<HostParameter*> kept_;
  std::vector<std::pair<HostParameter*, at::Tensor>> carried_;
};

}  // namespace hydra
