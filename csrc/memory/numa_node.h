// NUMA nodes: where the system says a device is, and from which node it takes the pages of new memory.
//
// Without nodes, and where the system refuses, nothing changes: a node is a matter of speed only. Thread-safe.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "csrc/base/types.h"

namespace hydra {

using NumaNode = int;

/// The node next to the PCI device with this address, such as 0000:3b:00.0. `sysfs` is where the system describes its
/// devices. Returns nullopt if it names no node.
std::optional<NumaNode> numa_node_of(const std::string& pci_address, const std::filesystem::path& sysfs = "/sys");

/// Makes the system take pages of whole system pages from this node, and from others once it has none left. Pages that
/// are there already stay where they are.
void prefer_numa_node(NumaNode node, void* begin, Bytes bytes) noexcept;

}  // namespace hydra
