#include "csrc/pytorch/homes/block_homes.h"

namespace hydra {

Home BlockHomes::home_of(std::int32_t block) const {
  if (device_.holds(block)) {
    return Home::kDevice;
  }
  const DiskHomes* const disk = disk_.homes();
  return disk != nullptr && disk->holds_weights(block) ? Home::kDisk : Home::kHost;
}

}  // namespace hydra
