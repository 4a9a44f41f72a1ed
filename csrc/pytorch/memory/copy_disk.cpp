#include "csrc/pytorch/memory/copy_disk.h"

#include <limits>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

CopyDisk::CopyDisk(const std::string& folder, std::shared_ptr<FileOperations> files)
    : files_(std::move(files)), file_(folder, files_ ? *files_ : system_files()), lane_(file_, kThreads) {}

std::int32_t CopyDisk::take(Bytes bytes) {
  const Bytes rounded = round_up(bytes, kDiskAlignment);
  if (const std::optional<std::int32_t> known = take_free(rounded, 2 * rounded)) {
    return *known;
  }
  try {
    const std::int32_t extent = file_.reserve(rounded);
    const std::lock_guard lock(mutex_);
    bytes_ += rounded;
    return extent;
  } catch (const SpillError&) {  // on a full disk any extent will do
    if (const std::optional<std::int32_t> known = take_free(rounded, std::numeric_limits<Bytes>::max())) {
      return *known;
    }
    throw;
  }
}

std::optional<std::int32_t> CopyDisk::take_free(Bytes least, Bytes most) {
  const std::lock_guard lock(mutex_);
  const auto found = free_extents_.lower_bound(least);
  if (found == free_extents_.end() || found->first > most) {
    return std::nullopt;
  }
  const std::int32_t extent = found->second;
  bytes_ += found->first;
  free_extents_.erase(found);
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
