// The way of gradients from faces to where they are at home: hooks, the sink, what a round gathers, what goes to the
// disk; and how others take, change and return what is on that way.
//
// Hooks hand gradients over on the threads that run backward. They end with clear_hooks(), before any of the parts that
// they use. Threads: any; a block's gradients are taken and returned by one thread at a time.
#pragma once

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
  /// Gradients cross the lane in this dtype, their own unless set; at most `bound` bytes at once, where that is not 0.
  GradientPath(DeviceBackend& backend, std::shared_ptr<HostArena> arena, ModelBlocks& blocks, BlockHomes& homes,
               WindowGate& gate, std::optional<at::ScalarType> transfer_dtype, Bytes bound);

  /// The parameter's face hands its gradients over from now on.
  void install_hooks(HostParameter& parameter);
  /// What the host's own graph computes for it is handed over, too, while a window is open.
  void divert(HostParameter& parameter);
  void clear_hooks();

  AccumulatingSink& sink() noexcept { return sink_; }
  GradientGathering& gathering() noexcept { return gathering_; }
  GradientSpill& spill() noexcept { return spill_; }

  /// From now on gradients stay on the device, where their sums are the same there.
  void begin_gathering();
  /// Whether one that stays for a round may be dropped again as if it had never been.
  bool may_accumulate_early(const at::Tensor& leaf) const;
  /// A gradient that has stayed on the device goes to its home.
  void hand_over(HostParameter& parameter, at::Tensor gradient);
  /// Those that were assigned to faces by hand go where the others go.
  void collect_assigned();

  /// Takes what was gathered of a block's gradients and is all there is of them, by parameter, or copies what is at
  /// home on the device; undefined elsewhere.
  std::vector<at::Tensor> take_gathered(std::int32_t block);
  /// What take_gathered() gave has become this, which is the whole gradient from now on.
  void return_gathered(std::int32_t block, std::size_t index, at::Tensor gradient);
  /// Nothing is to be added to the block's gradients any more in this window: that throws from now on. Returns which
  /// of them backward has brought, wholly or in part, since they were last finished; the others are as they were.
  /// Blocks until those on their way are home.
  std::vector<bool> finish(std::int32_t block);
  /// The window closes: something may be added again.
  void reopen() noexcept;

 private:
  DeviceBackend& backend_;
  ModelBlocks& blocks_;
  BlockHomes& homes_;
  WindowGate& gate_;
  const bool narrows_;  // gradients cross the lane in another dtype than sums have
  AccumulatingSink sink_;
  GradientGathering gathering_;
  GradientSpill spill_;
};

}  // namespace hydra
