// Moves of one model's blocks between their homes: the host, the device, the disk.
//
// Before a block's tensors move, its update ends; before its weights do, its slot has the hosts' bytes. Blocks settle
// outside windows only, under the gate; they come home at any moment, from any thread.
// Threads: any, without the interpreter lock.
#pragma once

#include <vector>

#include "csrc/base/process.h"
#include "csrc/pytorch/model/host_changes.h"
#include "csrc/pytorch/model/pending_update.h"

namespace hydra {

/// In place, as mul_(); wherever the home of this `.grad` is.
void scale_gradient(const at::Tensor& gradient, double factor);

class HomeMoves {
 public:
  HomeMoves(ModelBlocks& blocks, BlockHomes& homes, GradientSpill& spill, PendingUpdate& update, HostChanges& changes,
            WindowGate& gate)
      : blocks_(blocks), homes_(homes), spill_(spill), update_(update), changes_(changes), gate_(gate) {}

  /// Moves a block and its optimizer's `state` to the device, their home from now on; see DeviceHomes. False when they
  /// cannot go there.
  bool settle_on_device(std::int32_t block, const std::vector<at::Tensor>& state);
  /// The disk becomes the home of the block's `state`, or of its weights: false if they cannot go there.
  void settle_state_on_disk(std::int32_t block, const std::vector<at::Tensor>& state);
  bool settle_weights_on_disk(std::int32_t block);

  /// Blocks until a block's host tensors have their bytes: updated, and at home on the host.
  void bring_home(std::int32_t block);
  /// Likewise, for all blocks that use this storage; but of what is on the disk only what it has there.
  void bring_home(std::int32_t block, const c10::Storage& storage);
  /// Of all blocks; without `from_disk` what is there stays.
  void bring_all_home(bool from_disk);
  /// Before a window opens: blocks that were given other bytes, on the host, have the rest there, too.
  void review();
  /// What is not on the host is lost, and its tensors say so; an update under way has ended.
  void abandon() noexcept;

  /// Runs a block's part of an optimizer step now: on the device if that is its home, on the host if it is not.
  void update(const BlockUpdate& update, ThreadPool& pool, float scale);
  /// A copy of a tensor that is on the disk, whose home stays there; undefined if it is not.
  at::Tensor read_from_disk(const at::Tensor& tensor);
  /// In place; false if the gradient is not at home on the device, or on the disk.
  bool scale(const at::Tensor& gradient, double factor);

 private:
  ModelBlocks& blocks_;
  BlockHomes& homes_;
  GradientSpill& spill_;
  PendingUpdate& update_;
  HostChanges& changes_;
  WindowGate& gate_;
  const HomeProcess process_;
};

}  // namespace hydra
