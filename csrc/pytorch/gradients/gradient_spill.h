// Sends the gradients of blocks that backward has left to the disk, while the gradients of later blocks arrive.
//
// Does nothing before begin(). The disk, and the sink that brings gradients to the host, have to outlive it.
// Threads: those that run backward; one at a time stores, under a mutex.
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

  /// Sends the block's gradients to the disk from now on, when backward has left it. `backlog`: how many bytes may be
  /// on their way to the disk; the largest one given applies.
  void begin(std::int32_t block, Bytes backlog);
  /// Tells that backward has left these blocks. The gradients of the last one may still be on their way to the host,
  /// and are not waited for.
  void note_left(const BlockList& blocks);
  /// Stores all gradients that are on the host. Called at the end of a backward.
  void store_all();
  /// Stores the gradients of one block now.
  void store(std::int32_t block);

 private:
  ModelBlocks& blocks_;
  ModelDisk& disk_;
  AccumulatingSink& sink_;
  Bytes backlog_ = 0;
  std::mutex mutex_;  // one thread at a time stores gradients
  std::deque<std::int32_t> left_;
};

}  // namespace hydra
