// The homes that blocks of one model may have besides the host: the device, and the disk.
//
// Owns both. They know where tensors are; what has to happen before one of them moves is HomeMoves's to know. The disk
// ends before the device's homes, which end before the pager. Threads: as each of them says.
#pragma once

#include <memory>

#include "csrc/pytorch/homes/device_homes.h"
#include "csrc/pytorch/homes/model_disk.h"

namespace hydra {

class BlockHomes {
 public:
  /// `state`: device memory for the optimizer's state. All have to outlive the homes.
  BlockHomes(DeviceBackend& backend, Pager& pager, Resource& state, const std::shared_ptr<HostArena>& arena,
             ModelBlocks& blocks, const WindowGate& gate)
      : device_(backend, pager, state, arena), disk_(backend, arena, blocks, gate) {}

  DeviceHomes& device() noexcept { return device_; }
  ModelDisk& disk() noexcept { return disk_; }

 private:
  DeviceHomes device_;
  ModelDisk disk_;
};

}  // namespace hydra
