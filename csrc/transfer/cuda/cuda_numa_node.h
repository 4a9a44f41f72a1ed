// The NUMA node next to a CUDA device: the device's copies from and to memory of other nodes are slower. Thread-safe.
#pragma once

#include <filesystem>
#include <optional>

#include "csrc/memory/numa_node.h"

namespace hydra {

/// Returns nullopt if neither CUDA nor the system, at `sysfs`, can tell.
std::optional<NumaNode> cuda_numa_node(int device, const std::filesystem::path& sysfs = "/sys");

}  // namespace hydra
