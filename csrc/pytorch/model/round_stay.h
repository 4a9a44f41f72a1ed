// Keeps blocks pinned from one call to the next: those that a round stays in, and those that backward reached last.
//
// A round's microbatches run through the blocks of a stay one after another, so that reaching these blocks again has no
// effect. A backward without a round keeps each block that it reached last until the gradients of all its parameters
// are summed: no later node of that backward leads to one of them, and so none uses the block. This cannot be known of
// a block with frozen parameters, or with parameters that get no gradient, or get it in another backward than the one
// that reached the block. Such a block is kept until backward reaches others. All ends with the window.
// Threads: those that run backward, and the round's. A mutex guards the lists of blocks; under it only that of the
// activity log is taken. Calls that wait are made without the interpreter lock.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "csrc/pytorch/model/arrivals.h"
#include "csrc/pytorch/model/gradient_path.h"

namespace hydra {

class RoundStay {
 public:
  RoundStay(ModelMemory& memory, const ModelBlocks& blocks, Pager& pager, GradientPath& gradients, Arrivals& arrivals,
            const WindowGate& gate)
      : memory_(memory), blocks_(blocks), pager_(pager), gradients_(gradients), arrivals_(arrivals), gate_(gate) {}

  /// Begins a stay in these blocks: a round's microbatches run through them until the next call, or until the window
  /// closes. Meanwhile the blocks are pinned, and in a backward their gradients are gathered on the device.
  void stay_in(const BlockList& blocks, PassKind kind);
  /// Whether a round stays in all of these blocks.
  bool includes(const BlockList& blocks) const;
  /// Drops the low-precision copies of the stay's blocks.
  void drop_copies();
  /// Tells that backward has reached these blocks: they are pinned until their gradients are summed, it reaches others,
  /// or the window closes. The previous ones are unpinned. Does nothing after the context has ended.
  void arrive_backward(const BlockList& blocks);
  /// Tells that the backward that runs on this thread has summed the whole gradient of a parameter. Unpins the block if
  /// that was the last one.
  void note_summed(const HostParameter& parameter);
  /// Unpins all blocks and discards gathered gradients, because the window closes.
  void end() noexcept;

 private:
  /// Blocks, and the time since which compute is in them, for the activity log.
  struct Reached {
    BlockList blocks;
    Activity::Time begin{};
  };

  /// The blocks that backward pins.
  struct Summing {
    int backward = -1;                                 // torch's number of the backward that reached them
    std::vector<std::pair<std::int32_t, int>> blocks;  // with the number of gradients to come; -1 if it is not known
  };

  BlockList stays() const;
  BlockList exchange(Reached& reached, BlockList next) noexcept;
  /// Unpins what backward pins of the blocks that it reached last, and returns all of those. Takes over the pins of
  /// `reached`.
  BlockList leave_backward(const BlockList& reached = {});
  Summing summing(const BlockList& blocks) const;

  ModelMemory& memory_;
  const ModelBlocks& blocks_;
  Pager& pager_;
  GradientPath& gradients_;
  Arrivals& arrivals_;
  const WindowGate& gate_;
  mutable std::mutex mutex_;
  Reached backward_;
  Summing summing_;
  Reached stays_;
};

}  // namespace hydra
