// The homes that blocks of one model may have besides the host: the device, and the disk.
//
// Owns both, and tells which home a block has. They move tensors and index them; HomeMoves does what has to come before
// a move. The disk is destroyed before the device's homes, which are destroyed before the pager.
// Threads: see each of them. A block may move as soon as home_of() has returned, unless the caller prevents moves.
#pragma once

#include <memory>

#include "csrc/pytorch/homes/device_homes.h"
#include "csrc/pytorch/homes/model_disk.h"

namespace hydra {

/// The place of the truth of a block's weights. Fills of the block's slot read the weights there, and an optimizer step
/// updates them there. If it is the device, the slot itself has the truth, and gradients and optimizer state are on the
/// device too. The disk may also be the home of gradients and optimizer state alone: each tensor tells its own. If the
/// user gives a parameter other bytes (`.data = ...`), the block's home changes only before the next window: see
/// HomeMoves::review().
enum class Home : std::uint8_t { kHost, kDevice, kDisk };

class BlockHomes {
 public:
  /// `state`: device memory for the optimizer's state. All have to outlive the homes.
  BlockHomes(DeviceBackend& backend, Pager& pager, Resource& state, const std::shared_ptr<HostArena>& arena,
             ModelBlocks& blocks, const WindowGate& gate)
      : device_(backend, pager, state, arena), disk_(backend, arena, blocks, gate) {}

  Home home_of(std::int32_t block) const;
  DeviceHomes& device() noexcept { return device_; }
  ModelDisk& disk() noexcept { return disk_; }

 private:
  DeviceHomes device_;
  ModelDisk disk_;
};

}  // namespace hydra
