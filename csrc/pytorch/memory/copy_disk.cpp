#include "csrc/pytorch/memory/copy_disk.h"

#include <utility>

namespace hydra {

CopyDisk::CopyDisk(const std::string& folder, std::shared_ptr<FileOperations> files)
    : files_(std::move(files)), file_(folder, files_ ? *files_ : system_files()), lane_(file_, kThreads) {}

std::int32_t CopyDisk::take(Bytes bytes) {
  const Bytes rounded = round_up(bytes, kDiskAlignment);
  {
    const std::lock_guard lock(mutex_);
    const auto found = free_extents_.lower_bound(rounded);
    if (found != free_extents_.end() && found->first <= 2 * rounded) {
      const std::int32_t extent = found->second;
      bytes_ += found->first;
      free_extents_.erase(found);
      return extent;
    }
  }
  const std::int32_t extent = file_.reserve(rounded);
  const std::lock_guard lock(mutex_);
  bytes_ += rounded;
  return extent;
}

void CopyDisk::free(std::int32_t extent) noexcept {
  const Bytes bytes = file_.bytes(extent);
  const std::lock_guard lock(mutex_);
  bytes_ -= bytes;
  free_extents_.emplace(bytes, extent);
}

Bytes CopyDisk::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace hydra
