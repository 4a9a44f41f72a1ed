// Notes where a model's pass is and what the device holds there, for messages, the timeline and the activity log.
//
// Threads: any; samples have a mutex of their own.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/paging/pager.h"
#include "csrc/pytorch/model/model_memory.h"
#include "csrc/pytorch/parameters/model_blocks.h"

namespace hydra {

/// The memory that the device held when a pass reached a block.
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
  /// The kind of the last pass that began.
  PassKind pass() const noexcept { return pass_; }
  /// Notes the block that the pass is about to use, for messages.
  void approach(std::int32_t block) noexcept { block_ = block; }
  /// Takes a sample at a block that is present now.
  void note_arrival(std::int32_t block, PassKind kind);
  /// Logs that compute was in these blocks from `begin` until now.
  void note_compute(const BlockList& blocks, Activity::Time begin) noexcept;

  /// Keeps a sample of every arrival from now on, up to `samples` more.
  void record(std::size_t samples);
  std::vector<MemorySample> samples() const;
  /// What else to ask why nothing leaves; it returns an empty text if it does not know. Called before the first pass.
  void ask_also(std::function<std::string()> obstacle) { obstacle_ = std::move(obstacle); }
  /// What helps beside a larger budget, for messages. Called before the first pass.
  void advise(std::string remedies) { remedies_ = std::move(remedies); }
  /// The second half of an out-of-memory message: where the run is, what the device holds, and what to change.
  std::string explain() const;

 private:
  /// Logs the memory that the device holds now.
  void note_memory() noexcept;

  ModelMemory& memory_;
  const ModelBlocks& blocks_;
  const Pager& pager_;
  std::function<std::string()> obstacle_;
  std::string remedies_ =
      "or offload or recompute activations (activations=hydra_ext.Offload() or hydra_ext.Recompute(), recompute=True "
      "in run.step); or run fewer microbatches together (round_size= in run.step), name smaller blocks=, or shrink the "
      "batch";
  std::atomic<PassKind> pass_{PassKind::kForward};
  std::atomic<std::int32_t> block_{-1};
  mutable std::mutex mutex_;
  std::size_t room_ = 0;
  std::vector<MemorySample> samples_;
};

}  // namespace hydra
