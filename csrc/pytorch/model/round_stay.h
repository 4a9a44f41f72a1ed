// Blocks that stay pinned from one call to the next: those that a round stays in, and those that backward reached last.
//
// A round's microbatches run through the blocks it stays in, one after another; reaching them is no news then. A
// backward without a round stays in the blocks it reached last. Both end with the window.
// Threads: those that run backward, and the round's; a mutex guards which blocks they are; under it only the
// activity log's is taken. Calls that wait are made without the interpreter lock.
#pragma once

#include <mutex>

#include "csrc/pytorch/model/arrivals.h"
#include "csrc/pytorch/model/gradient_path.h"

namespace hydra {

class RoundStay {
 public:
  RoundStay(ModelMemory& memory, Pager& pager, GradientPath& gradients, Arrivals& arrivals, const WindowGate& gate)
      : memory_(memory), pager_(pager), gradients_(gradients), arrivals_(arrivals), gate_(gate) {}

  /// A round's microbatches run through these blocks until the next call, or until the window closes. Meanwhile they
  /// are pinned, and in a backward their gradients are gathered on the device.
  void stay_in(const BlockList& blocks, PassKind kind);
  /// Whether a round stays in all of these.
  bool includes(const BlockList& blocks) const;
  /// Drops the low-precision copies of the blocks stayed in.
  void drop_copies();
  /// Backward has reached these blocks: those before are unpinned, these pinned, until the window closes or the next
  /// ones are reached. Nothing happens after the context.
  void arrive_backward(const BlockList& blocks);
  /// The window closes.
  void end() noexcept;

 private:
  /// Blocks, and since when compute is in them, for the activity log.
  struct Reached {
    BlockList blocks;
    Activity::Time begin{};
  };

  BlockList stays() const;
  BlockList exchange(Reached& reached, BlockList next) noexcept;

  ModelMemory& memory_;
  Pager& pager_;
  GradientPath& gradients_;
  Arrivals& arrivals_;
  const WindowGate& gate_;
  mutable std::mutex mutex_;
  Reached backward_;
  Reached stays_;
};

}  // namespace hydra
