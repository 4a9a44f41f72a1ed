// Moves one model's blocks between their homes: the host, the device and the disk.
//
// A block's update ends before its tensors move. Its slot is brought up to date before its weights settle. Blocks
// settle only outside windows, under the gate. They come home to the host at any moment, on any thread.
// Threads: any, without the interpreter lock.
#pragma once

#include <vector>

#include "csrc/base/process.h"
#include "csrc/pytorch/model/host_changes.h"
#include "csrc/pytorch/model/pending_update.h"

namespace hydra {

/// Multiplies this `.grad` in place, as mul_() does, wherever its home is.
void scale_gradient(const at::Tensor& gradient, double factor);

class HomeMoves {
 public:
  HomeMoves(ModelBlocks& blocks, BlockHomes& homes, GradientSpill& spill, PendingUpdate& update, HostChanges& changes,
            WindowGate& gate)
      : blocks_(blocks), homes_(homes), spill_(spill), update_(update), changes_(changes), gate_(gate) {}

  /// Makes the device the home of a block and of its optimizer's `state`; see DeviceHomes. Returns false if they cannot
  /// move there.
  bool settle_on_device(std::int32_t block, const std::vector<at::Tensor>& state);
  /// Makes the disk the home of the block's `state`.
  void settle_state_on_disk(std::int32_t block, const std::vector<at::Tensor>& state);
  /// Makes the disk the home of the block's weights. Returns false if they cannot move there.
  bool settle_weights_on_disk(std::int32_t block);

  /// Blocks until the block's host tensors are updated and have their bytes on the host.
  void bring_home(std::int32_t block);
  /// Does the same, but brings only the extent of this storage from the disk. Also ends the updates of all other blocks
  /// that use the storage.
  void bring_home(std::int32_t block, const c10::Storage& storage);
  /// Brings all blocks to the host. Bytes on the disk stay there unless `from_disk`.
  void bring_all_home(bool from_disk);
  /// Called before a window opens. If the user gave a parameter other bytes on the host, brings the rest of its block
  /// there too.
  void review();
  /// Ends an update under way, and drops all bytes that are not on the host. Operations on their tensors raise from now
  /// on.
  void abandon() noexcept;

  /// Runs a block's part of an optimizer step now: on the device if that is its home, otherwise on the host.
  void update(const BlockUpdate& update, ThreadPool& pool, float scale);
  /// Returns a copy of a tensor whose home is the disk, and stays there. The copy is undefined if it is not.
  at::Tensor read_from_disk(const at::Tensor& tensor);
  /// Multiplies the gradient in place. Returns false if its home is neither the device nor the disk.
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
