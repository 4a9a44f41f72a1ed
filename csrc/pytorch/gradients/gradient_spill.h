// Gradients on their way to the disk: those of blocks that backward has left, once those of others have come.
//
// Nothing happens before begin(). Threads: those that run backward; one at a time stores, under a mutex. The disk, and
// the sink by which gradients reach the host, have to outlive this.
#pragma once

#include <deque>
#include <mutex>

#include "csrc/pytorch/gradients/gradient_sink.h"
#include "csrc/pytorch/homes/model_disk.h"

namespace hydra {

class GradientSpill {
 public:
  GradientSpill(ModelBlocks& blocks, ModelDisk& disk, AccumulatingSink& sink)
      : blocks_(blocks), disk_(disk), sink_(sink) {}

  /// From now on the block's gradients go to the disk when backward has left it; so many bytes may be on their way.
  void begin(std::int32_t block, Bytes backlog);
  /// Backward has left these blocks. The last one's gradients may be on their way still, and are not waited for.
  void note_left(const BlockList& blocks);
  /// At the end of a backward: all that is on the host.
  void store_all();
  /// One block's, whatever backward does.
  void store(std::int32_t block);

 private:
  ModelBlocks& blocks_;
  ModelDisk& disk_;
  AccumulatingSink& sink_;
  Bytes backlog_ = 0;
  std::mutex mutex_;  // one thread at a time stores what was left
  std::deque<std::int32_t> left_;
};

}  // namespace hydra
