// Keeps blocks pinned from one call to the next: those that a round stays in, and those that backward reached last.
//
// A round's microbatches run through the blocks of a stay one after another, so that reaching these blocks again has no
// effect. A backward without a round keeps the blocks that it reached last. Both end with the window.
// Threads: those that run backward, and the round's. A mutex guards the lists of blocks; under it only that of the
// activity log is taken. Calls that wait are made without the interpreter lock.
#pragma once

#include <mutex>

#include "csrc/pytorch/model/arrivals.h"
#include "csrc/pytorch/model/gradient_path.h"

namespace hydra {

class RoundStay {
 public:
  RoundStay(ModelMemory& memory, Pager& pager, GradientPath& gradients, Arrivals& arrivals, const WindowGate& gate)
      : memory_(memory), pager_(pager), gradients_(gradients), arrivals_(arrivals), gate_(gate) {}

  /// Begins a stay in these blocks: a round's microbatches run through them until the next call, or until the window
  /// closes. Meanwhile the blocks are pinned, and in a backward their gradients are gathered on the device.
  void stay_in(const BlockList& blocks, PassKind kind);
  /// Whether a round stays in all of these blocks.
  bool includes(const BlockList& blocks) const;
  /// Drops the low-precision copies of the stay's blocks.
  void drop_copies();
  /// Tells that backward has reached these blocks: they are pinned until it reaches others, or the window closes, and
  /// the previous ones are unpinned. Does nothing after the context has ended.
  void arrive_backward(const BlockList& blocks);
  /// Unpins all blocks and discards gathered gradients, because the window closes.
  void end() noexcept;

 private:
  /// Blocks, and the time since which compute is in them, for the activity log.
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
