// Gradients that stay on the device while several microbatches add to them.
//
// In a round the microbatches of a block's backward follow one another, so that the block's gradient need leave only
// once. It may stay where the result is the same to the last bit: nothing has been summed on the host yet, the sum
// there would be of the same dtype, and nothing watches the host's sum grow.
//
// What a round has gathered before it is known that its backward can be run to the end is carried over to there, or
// dropped as if it had never been.
// Threads: any; keep() is called by those that run backward. What is carried is one thread's, that of the round.
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
  /// Everything stays, until carry().
  void begin_early();
  /// Whether the parameter's gradient may stay, were there one.
  bool would_keep(const HostParameter& parameter) const;
  /// What stayed is taken from the faces and kept, whatever else begins or is discarded, up to the next end().
  void carry();
  void drop_carried() noexcept;
  /// The face of `parameter` has got a gradient. True if it is to stay there.
  bool keep(HostParameter& parameter);
  /// Likewise, between begin_early() and carry(); false else.
  bool keep_early(HostParameter& parameter);
  /// Takes the gradient of `parameter` away if it has stayed and is all there is of it; undefined else.
  at::Tensor take(HostParameter& parameter);
  /// Whatever stayed is handed over; nothing stays from now on. Returns its bytes.
  Bytes end(const HandOver& hand_over);
  /// The pass has failed: what stayed is forgotten.
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
