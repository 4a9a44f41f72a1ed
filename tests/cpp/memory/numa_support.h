// What the system says about the NUMA policy of memory, and a folder that says where devices are, as sysfs does.
#pragma once

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "csrc/memory/numa_node.h"

namespace hydra::test {

/// The policy of one page.
struct NumaPolicy {
  int mode = -1;
  std::array<unsigned long, 16> nodes{};

  bool prefers(NumaNode node) const {
    std::array<unsigned long, 16> wanted{};
    wanted[0] = 1UL << node;
    return mode == MPOL_PREFERRED && nodes == wanted;
  }
};

/// Nothing if the system does not tell.
inline std::optional<NumaPolicy> numa_policy_at(void* address) {
  NumaPolicy policy;
  const long status = ::syscall(SYS_get_mempolicy, &policy.mode, policy.nodes.data(), policy.nodes.size() * 64 + 1,
                                address, static_cast<unsigned long>(MPOL_F_ADDR));
  return status == 0 ? std::optional(policy) : std::nullopt;
}

/// Whether this process may set policies. Containers often forbid it.
inline bool may_prefer_nodes() {
  const unsigned long node = 1;
  return ::syscall(SYS_set_mempolicy, MPOL_PREFERRED, &node, 65UL) == 0 &&
         ::syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0UL) == 0;
}

class FakeSysfs {
 public:
  FakeSysfs() { std::filesystem::create_directories(path_); }
  ~FakeSysfs() { std::filesystem::remove_all(path_); }
  FakeSysfs(const FakeSysfs&) = delete;
  FakeSysfs& operator=(const FakeSysfs&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  void place(const std::string& pci_address, const std::string& node) const {
    const std::filesystem::path folder = path_ / "bus/pci/devices" / pci_address;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "numa_node") << node;
  }

 private:
  const std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) / ("hydra_sysfs_" + std::to_string(::getpid()));
};

}  // namespace hydra::test
