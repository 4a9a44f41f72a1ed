// Gradients that stay on the device while several microbatches add to them.
//
// In a round the microbatches of a block's backward follow one another, so that the block's gradient need leave only
// once. It may stay where the result is the same to the last bit: nothing has been summed on the host yet, the sum
// there would be of the same dtype, and nobody watches the host's sum grow.
// Threads: any; keep() is called by those that run backward.
#pragma once

#include <mutex>
#include <vector>

#include "csrc/pytorch/gradient_sink.h"

namespace hydra {

class GradientGathering {
 public:
  void begin();
  /// The face of `parameter` has got a gradient. True if it is to stay there.
  bool keep(HostParameter& parameter);
  /// Takes the gradient of `parameter` away if it has stayed and is all there is of it; undefined else.
  at::Tensor take(HostParameter& parameter);
  /// Whatever stayed goes to `sink`; nothing stays from now on. Returns its bytes.
  Bytes end(GradientSink& sink);
  /// The pass has failed: what stayed is forgotten.
  void discard() noexcept;

 private:
  std::vector<HostParameter*> take_all();

  std::mutex mutex_;
  bool active_ = false;
  std::vector<HostParameter*> kept_;
};

}  // namespace hydra
