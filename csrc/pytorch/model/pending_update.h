// An optimizer step that runs while the model goes on: what it writes is withheld until it is written.
//
// Until a block is done its tensors are withheld, and its fills wait. Owns the step, and references to its tensors; has
// to end before the disk that it works on. Threads: any; a mutex guards the step, what it withholds, and counters. What
// ends with a step ends without that mutex, as torch takes the interpreter lock where a tensor ends.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "csrc/optim/deferred_update.h"
#include "csrc/pytorch/gradients/leaving_norm.h"
#include "csrc/pytorch/homes/model_disk.h"
#include "csrc/pytorch/parameters/tensor_plan.h"
#include "csrc/pytorch/parameters/update_hold.h"

namespace hydra {

/// One block's part of an optimizer step, or that of several whose weights overlap, and the tensors that it reads and
/// writes.
struct BlockUpdate {
  BlockList blocks;
  TensorPlan plan;
  std::vector<at::Tensor> tensors;
};

class PendingUpdate {
 public:
  PendingUpdate(DeviceBackend& backend, ModelBlocks& blocks, ModelDisk& disk, LeavingNorm& norm, const WindowGate& gate)
      : backend_(backend), blocks_(blocks), disk_(disk), norm_(norm), gate_(gate) {}

  /// Begins a step, blocks in this order; see DeferredUpdate. Blocks whose storages other tensors share are updated on
  /// return. Outside windows.
  void defer(std::vector<BlockUpdate> updates, std::shared_ptr<ThreadPool> pool, float scale);
  /// Blocks until the block, or all, is updated, and gives tensors back.
  void finish(std::int32_t block);
  void finish();
  /// As the first, of all blocks that use the storage.
  void finish(std::int32_t block, const c10::Storage& storage);
  /// Gives back what is updated; waits for nothing.
  void reap();
  /// Gives back what will never be updated.
  void abandon() noexcept;

  /// Steps that were deferred, how long their threads worked, and what they have read and written.
  std::int64_t deferred() const;
  double seconds() const;
  Bytes bytes() const;
  /// How long others than the lanes waited for them.
  double wait_seconds() const;

 private:
  DeferredUpdate::Part part_of(const BlockUpdate& update) const;
  /// What the update reads and writes, which it is noted to do.
  UpdateHold::Share share_of(const BlockUpdate& update);
  /// Adds how many references to storages the model itself keeps.
  void add_references_kept(UpdateHold::ReferenceCounts& kept) const;
  std::shared_ptr<DeferredUpdate> running() const;
  void give_back_locked(std::int32_t block, UpdateHold::Departed& departed) noexcept;
  void give_all_back_locked(UpdateHold::Departed& departed) noexcept;
  void note_wait(Activity::Time begin, double seconds, std::int32_t block);

  DeviceBackend& backend_;
  ModelBlocks& blocks_;
  ModelDisk& disk_;
  LeavingNorm& norm_;
  const WindowGate& gate_;
  mutable std::mutex mutex_;
  std::shared_ptr<DeferredUpdate> update_;
  UpdateHold hold_;  // what update_ reads and writes
  std::int64_t deferred_ = 0;
  double seconds_ = 0.0;  // of those that have ended
  Bytes bytes_ = 0;       // likewise
  double wait_seconds_ = 0.0;
};

}  // namespace hydra
