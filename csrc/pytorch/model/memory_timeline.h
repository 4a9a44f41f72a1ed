// Where a model's pass is, and what the device held there: for messages, for the timeline, and for the activity log.
//
// Threads: any; samples have a mutex of their own.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/paging/pager.h"
#include "csrc/pytorch/model/model_memory.h"
#include "csrc/pytorch/parameters/model_blocks.h"

namespace hydra {

/// What the device held when a pass reached a block.
struct MemorySample {
  PassKind kind = PassKind::kForward;
  std::int32_t block = 0;
  MemoryUse use;
};

class MemoryTimeline {
 public:
  MemoryTimeline(ModelMemory& memory, const ModelBlocks& blocks, const Pager& pager)
      : memory_(memory), blocks_(blocks), pager_(pager) {}

  void begin_pass(PassKind kind) noexcept;
  void end_pass() noexcept;
  /// Of the last one that began.
  PassKind pass() const noexcept { return pass_; }
  /// The pass comes to a block, and has it.
  void approach(std::int32_t block) noexcept { block_ = block; }
  void note_arrival(std::int32_t block, PassKind kind);
  /// For the activity log: compute has been in these blocks since then.
  void note_compute(const BlockList& blocks, Activity::Time begin) noexcept;

  /// From now on every arrival at a block is noted, as long as there is room for `samples` more.
  void record(std::size_t samples);
  std::vector<MemorySample> samples() const;
  /// Where the run is, what the device holds, and what to change: the second half of an out-of-memory message.
  std::string explain() const;

 private:
  /// For the activity log: what the device holds now.
  void note_memory() noexcept;

  ModelMemory& memory_;
  const ModelBlocks& blocks_;
  const Pager& pager_;
  std::atomic<PassKind> pass_{PassKind::kForward};
  std::atomic<std::int32_t> block_{-1};
  mutable std::mutex mutex_;
  std::size_t room_ = 0;
  std::vector<MemorySample> samples_;
};

}  // namespace hydra
