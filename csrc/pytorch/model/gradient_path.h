// The path of gradients from faces to their home: the hooks, the sink, the gathering of a round, and the spill to the
// disk. Callers may take a block's gradients off this path, change them and return them.
//
// Hooks hand gradients over on the threads that run backward. clear_hooks() removes them before the parts that they use
// are destroyed.
// Threads: any. One thread at a time takes and returns a block's gradients.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/pytorch/gradients/gradient_gathering.h"
#include "csrc/pytorch/gradients/gradient_sink.h"
#include "csrc/pytorch/gradients/gradient_spill.h"
#include "csrc/pytorch/homes/block_homes.h"

namespace hydra {

class GradientPath {
 public:
  /// `transfer_dtype`: the dtype in which gradients cross the lane; by default their own. `bound`: the most bytes that
  /// may be on their way at once; 0 sets no bound.
  GradientPath(DeviceBackend& backend, std::shared_ptr<HostArena> arena, ModelBlocks& blocks, BlockHomes& homes,
               WindowGate& gate, std::optional<at::ScalarType> transfer_dtype, Bytes bound);

  /// Makes the parameter's face hand its gradients over from now on. `summed` is called before each time.
  void install_hooks(HostParameter& parameter, std::function<void()> summed);
  /// While a window is open, also hands over the gradients that autograd computes for the host parameter itself.
  void divert(HostParameter& parameter);
  void clear_hooks();

  AccumulatingSink& sink() noexcept { return sink_; }
  GradientGathering& gathering() noexcept { return gathering_; }
  GradientSpill& spill() noexcept { return spill_; }

  /// Keeps gradients on the device from now on, if their sums there have the same bits.
  void begin_gathering();
  /// Whether a gradient that `leaf` gets before the round is planned stays on the device, so that it can be dropped
  /// without a trace.
  bool may_accumulate_early(const at::Tensor& leaf) const;
  /// Sends a gradient that has stayed on the device to its home.
  void hand_over(HostParameter& parameter, at::Tensor gradient);
  /// Sends the gradients that were assigned to faces by hand to their homes too.
  void collect_assigned();

  /// Returns a block's gradients, by parameter, as far as they are wholly on the device. Takes those that were
  /// gathered, and copies those whose home is the device. Other gradients are undefined in the result.
  std::vector<at::Tensor> take_gathered(std::int32_t block);
  /// Replaces a gradient that take_gathered() returned. `gradient` is the whole gradient from now on.
  void return_gathered(std::int32_t block, std::size_t index, at::Tensor gradient);
  /// Completes the block's gradients: in this window, adding to them throws from now on. Blocks until those on their
  /// way are home. Returns, by parameter, whether backward has brought a gradient, or a part of it, since the last
  /// call; the others are unchanged.
  std::vector<bool> finish(std::int32_t block);
  /// Allows gradients to be added again, because the window closes.
  void reopen() noexcept;

 private:
  DeviceBackend& backend_;
  ModelBlocks& blocks_;
  BlockHomes& homes_;
  WindowGate& gate_;
  const bool narrows_;  // gradients cross the lane in a dtype other than that of their sums
  AccumulatingSink sink_;
  GradientGathering gathering_;
  GradientSpill spill_;
};

}  // namespace hydra
