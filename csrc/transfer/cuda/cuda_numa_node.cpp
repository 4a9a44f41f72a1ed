#include "csrc/transfer/cuda/cuda_numa_node.h"

#include <algorithm>
#include <array>
#include <string>

#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

std::optional<NumaNode> cuda_numa_node(int device, const std::filesystem::path& sysfs) {
  std::array<char, 32> text{};
  const cudaError_t status = cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device);
  if (status != cudaSuccess) {
    forget_cuda_error(status);
    return std::nullopt;
  }
  std::string address = text.data();
  // CUDA writes capital letters, the system small ones.
  std::ranges::transform(address, address.begin(), [](char sign) {
    return 'A' <= sign && sign <= 'F' ? static_cast<char>(sign - 'A' + 'a') : sign;
  });
  return numa_node_of(address, sysfs);
}

}  // namespace hydra
