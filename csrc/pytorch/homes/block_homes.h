// The homes that blocks of one model may have besides the host: the device, and the disk.
//
// Owns both, and answers which one a block has. They know where tensors are; HomeMoves knows what has to happen before
// one of them moves. The disk ends before the device's homes, which end before the pager. Threads: as each of them
// says; a block may move as soon as home_of() has returned, unless the caller keeps moves out.
#pragma once

#include <memory>

#include "csrc/pytorch/homes/device_homes.h"
#include "csrc/pytorch/homes/model_disk.h"

namespace hydra {

/// Where the truth of a block's weights is: where a fill of its slot comes from, and where an optimizer step finds
/// them. On the device the slot itself is that. Gradients and optimizer state are with the weights on the device;
/// whether they are on the disk each tensor says for itself. A parameter that was given other bytes (`.data = ...`)
/// changes nothing before the next window: see HomeMoves::review().
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
