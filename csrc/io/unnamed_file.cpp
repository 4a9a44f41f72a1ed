#include "csrc/io/unnamed_file.h"

#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {
namespace {

constexpr int kMostInterruptions = 1000;  // in a row, without progress of the transfer

// Some kernels' linux/magic.h lack these.
constexpr unsigned kCifs = 0xff534d42U;
constexpr unsigned kSmb2 = 0xfe534d42U;
constexpr unsigned kLustre = 0x0bd00bd0U;
constexpr unsigned kGpfs = 0x47504653U;
constexpr std::array kOfOtherMachines = {static_cast<unsigned>(NFS_SUPER_MAGIC),
                                         static_cast<unsigned>(SMB_SUPER_MAGIC),
                                         kCifs,
                                         kSmb2,
                                         kLustre,
                                         kGpfs,
                                         static_cast<unsigned>(CEPH_SUPER_MAGIC),
                                         static_cast<unsigned>(AFS_SUPER_MAGIC),
                                         static_cast<unsigned>(V9FS_MAGIC)};

std::string reason(int error) { return std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")"; }

/// Describes the free room in the folder, or returns an empty string if it is unknown.
std::string room_in(const std::string& folder) {
  struct statvfs found{};
  if (::statvfs(folder.c_str(), &found) != 0) {
    return "";
  }
  return "; it has " + human_bytes(static_cast<Bytes>(found.f_bavail) * static_cast<Bytes>(found.f_frsize)) + " free";
}

bool is_interrupted(ssize_t result) noexcept { return result == -EINTR || result == -EAGAIN; }

void expect_local(const std::string& folder) {
  struct statfs found{};
  if (::statfs(folder.c_str(), &found) != 0) {
    throw SpillError("spill_dir '" + folder + "' cannot be used: " + reason(errno) +
                     ": name an existing folder on a disk of this machine");
  }
  const auto kind = static_cast<unsigned>(found.f_type);
  HYDRA_EXPECT(std::find(kOfOtherMachines.begin(), kOfOtherMachines.end(), kind) == kOfOtherMachines.end(), SpillError,
               "spill_dir '" + folder +
                   "' is on a network file system, where every step would wait for another machine: name a folder on a "
                   "disk of this machine");
}

}  // namespace

UnnamedFile::UnnamedFile(std::string folder, FileOperations& files) : folder_(std::move(folder)), files_(files) {
  expect_local(folder_);
  descriptor_ = files_.open_unnamed(folder_.c_str());
  HYDRA_EXPECT(descriptor_ >= 0, SpillError,
               "no file could be made in spill_dir '" + folder_ + "': " + reason(-descriptor_) +
                   ": name a folder that this process may write to");
}

UnnamedFile::~UnnamedFile() { files_.close(descriptor_); }

/// Tries one transfer, since some file systems accept the flag and then refuse every transfer.
void UnnamedFile::try_bypassing_cache() {
  if (files_.bypass_cache(descriptor_, true) < 0) {
    return;
  }
  const std::unique_ptr<void, decltype(&std::free)> page(std::aligned_alloc(kDiskAlignment, kDiskAlignment),
                                                         &std::free);
  HYDRA_EXPECT(page, OutOfMemory,
               "the heap could not give a page of " + human_bytes(kDiskAlignment) + "; free host memory");
  std::memset(page.get(), 0, kDiskAlignment);
  const bool writes = files_.write(descriptor_, page.get(), kDiskAlignment, 0) == kDiskAlignment;
  bypasses_cache_ = writes && files_.read(descriptor_, page.get(), kDiskAlignment, 0) == kDiskAlignment;
  if (!bypasses_cache_) {
    files_.bypass_cache(descriptor_, false);
  }
}

Bytes UnnamedFile::extend(Bytes bytes) {
  home_.expect_here();
  const int result = files_.allocate(descriptor_, bytes_, bytes);
  HYDRA_EXPECT(result == 0, SpillError,
               "no room for " + human_bytes(bytes) + " in spill_dir '" + folder_ + "', which has " +
                   human_bytes(bytes_) + " already: " + reason(-result) + room_in(folder_) +
                   ". Free some room, name another folder, or give a larger host_budget=");
  bytes_ += bytes;
  return bytes_ - bytes;
}

/// Returns the bytes that a transfer, which may have been short, has completed. Rounds down if the next transfer has to
/// begin at an aligned offset.
Bytes UnnamedFile::progress(ssize_t result, int& interruptions) const noexcept {
  const Bytes whole = bypasses_cache_ ? result / kDiskAlignment * kDiskAlignment : result;
  interruptions = whole > 0 ? 0 : interruptions + 1;
  return whole;
}

void UnnamedFile::transfer(Bytes bytes, const char* doing, const std::function<ssize_t(Bytes, Bytes)>& move) const {
  home_.expect_here();
  int interruptions = 0;
  for (Bytes done = 0; done < bytes;) {
    const ssize_t result = move(done, bytes - done);
    if (is_interrupted(result) && ++interruptions < kMostInterruptions) {
      continue;
    }
    HYDRA_EXPECT(result > 0 && interruptions < kMostInterruptions, SpillError,
                 std::string(doing) + " " + human_bytes(bytes) + " in spill_dir '" + folder_ +
                     "' failed: " + reason(result >= 0 ? EIO : static_cast<int>(-result)) + room_in(folder_));
    done += progress(result, interruptions);
  }
}

void UnnamedFile::write(const void* data, Bytes bytes, Bytes offset) {
  const auto* const from = static_cast<const std::byte*>(data);
  transfer(bytes, "writing",
           [&](Bytes done, Bytes left) { return files_.write(descriptor_, from + done, left, offset + done); });
}

void UnnamedFile::read_ahead(Bytes bytes, Bytes offset) const {
  home_.expect_here();
  files_.will_need(descriptor_, offset, bytes);
}

void UnnamedFile::read(void* data, Bytes bytes, Bytes offset) {
  auto* const to = static_cast<std::byte*>(data);
  transfer(bytes, "reading",
           [&](Bytes done, Bytes left) { return files_.read(descriptor_, to + done, left, offset + done); });
}

}  // namespace hydra
