// An optimizer step that runs while the model goes on. It withholds the tensors that it reads and writes.
//
// Until a block is updated its tensors are withheld, and its fills wait. Owns the step, and references to its tensors.
// Has to be destroyed before the disk that it works on.
// Threads: any; a mutex guards the step, the withheld storages and the counters. The tensors of an ended step are
// destroyed without that mutex, because torch takes the interpreter lock when a tensor ends.
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

/// The part of an optimizer step for one block, or for several blocks whose weights overlap, and the tensors that it
/// reads and writes.
struct BlockUpdate {
  BlockList blocks;
  TensorPlan plan;
  std::vector<at::Tensor> tensors;
};

class PendingUpdate {
 public:
  PendingUpdate(DeviceBackend& backend, ModelBlocks& blocks, ModelDisk& disk, LeavingNorm& norm, const WindowGate& gate)
      : backend_(backend), blocks_(blocks), disk_(disk), norm_(norm), gate_(gate) {}

  /// Begins a step that updates the blocks in this order; see DeferredUpdate. When it returns, blocks whose storages
  /// have other owners are updated. Called outside windows.
  void defer(std::vector<BlockUpdate> updates, std::shared_ptr<ThreadPool> pool, float scale);
  /// Blocks until the block is updated, and returns its tensors.
  void finish(std::int32_t block);
  /// Blocks until all blocks are updated, and returns their tensors.
  void finish();
  /// Does the same for the block and for all blocks that use the storage.
  void finish(std::int32_t block, const c10::Storage& storage);
  /// Returns the tensors of blocks that are updated. Never waits.
  void reap();
  /// Returns all tensors, updated or not, and drops the step. Blocks until its thread has ended.
  void abandon() noexcept;

  /// The number of steps that were deferred, the seconds that their threads worked, and the bytes that they have read
  /// and written.
  std::int64_t deferred() const;
  double seconds() const;
  Bytes bytes() const;
  /// The seconds that threads other than those of lanes waited for them.
  double wait_seconds() const;

 private:
  DeferredUpdate::Part part_of(const BlockUpdate& update) const;
  /// Returns the tensors that the update reads and writes, and notes its writes to parameters.
  UpdateHold::Share share_of(const BlockUpdate& update);
  /// Adds the references to storages that the model itself keeps.
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
  UpdateHold hold_;  // the storages that update_ reads and writes
  std::int64_t deferred_ = 0;
  double seconds_ = 0.0;  // of steps that have ended
  Bytes bytes_ = 0;       // of steps that have ended
  double wait_seconds_ = 0.0;
};

}  // namespace hydra
