#include "csrc/memory/numa_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <limits>

namespace hydra {

std::optional<NumaNode> numa_node_of(const std::string& pci_address, const std::filesystem::path& sysfs) {
  std::ifstream file(sysfs / "bus/pci/devices" / pci_address / "numa_node");
  NumaNode node = -1;
  file >> node;
  return file && node >= 0 ? std::optional(node) : std::nullopt;
}

void prefer_numa_node(NumaNode node, void* begin, Bytes bytes) noexcept {
  using Word = unsigned long;
  constexpr std::size_t kWordBits = std::numeric_limits<Word>::digits;
  std::array<Word, 16> nodes{};
  const auto number = static_cast<std::size_t>(node);
  if (number < nodes.size() * kWordBits) {
    nodes[number / kWordBits] = Word{1} << (number % kWordBits);
    // The call itself, since the C library has it in libnuma only. The system reads one bit less than it is told.
    ::syscall(SYS_mbind, begin, static_cast<Word>(bytes), MPOL_PREFERRED, nodes.data(), nodes.size() * kWordBits + 1,
              0U);
  }
}

}  // namespace hydra
