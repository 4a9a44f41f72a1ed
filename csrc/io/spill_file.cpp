#include "csrc/io/spill_file.h"

#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/io/checksum.h"

namespace hydra {
namespace {

constexpr int kMostInterruptions = 1000;  // in a row, without progress of the transfer

constexpr Bytes divide_up(Bytes value, Bytes by) noexcept { return (value + by - 1) / by; }

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

SpillFile::SpillFile(std::string folder, FileOperations& files) : folder_(std::move(folder)), files_(files) {
  expect_local(folder_);
  descriptor_ = files_.open_unnamed(folder_.c_str());
  HYDRA_EXPECT(descriptor_ >= 0, SpillError,
               "no file could be made in spill_dir '" + folder_ + "': " + reason(-descriptor_) +
                   ": name a folder that this process may write to");
  try {
    try_bypassing_cache();
  } catch (...) {
    files_.close(descriptor_);
    throw;
  }
}

SpillFile::~SpillFile() { files_.close(descriptor_); }

/// Tries one transfer, since some file systems accept the flag and then refuse every transfer.
void SpillFile::try_bypassing_cache() {
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

std::int32_t SpillFile::reserve(Bytes bytes) {
  home_.expect_here();
  const Bytes rounded = round_up(std::max<Bytes>(bytes, 1), kDiskAlignment);
  const std::lock_guard lock(mutex_);
  const int result = files_.allocate(descriptor_, reserved_, rounded);
  HYDRA_EXPECT(result == 0, SpillError,
               "no room for " + human_bytes(rounded) + " in spill_dir '" + folder_ + "', which has " +
                   human_bytes(reserved_) + " already: " + reason(-result) + room_in(folder_) +
                   ". Free some room, name another folder, or give a larger host_budget=");
  auto extent = std::make_unique<Extent>();
  extent->offset = reserved_;
  extent->bytes = rounded;
  extent->piece_bytes = round_up(divide_up(rounded, divide_up(rounded, kPieceBytes)), kDiskAlignment);
  extent->pieces.resize(static_cast<std::size_t>(divide_up(rounded, extent->piece_bytes)));
  reserved_ += rounded;
  extents_.push_back(std::move(extent));
  return static_cast<std::int32_t>(extents_.size()) - 1;
}

Bytes SpillFile::bytes(std::int32_t extent) const {
  const std::lock_guard lock(mutex_);
  return extents_.at(static_cast<std::size_t>(extent))->bytes;
}

std::int64_t SpillFile::pieces(std::int32_t extent) const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(extents_.at(static_cast<std::size_t>(extent))->pieces.size());
}

Bytes SpillFile::piece_bytes(std::int32_t extent, std::int64_t piece) const { return span(extent, piece).bytes; }

/// Returns the bytes that a transfer, which may have been short, has completed. Rounds down if the next transfer has to
/// begin at an aligned offset.
Bytes SpillFile::progress(ssize_t result, int& interruptions) const noexcept {
  const Bytes whole = bypasses_cache_ ? result / kDiskAlignment * kDiskAlignment : result;
  interruptions = whole > 0 ? 0 : interruptions + 1;
  return whole;
}

Bytes SpillFile::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

SpillFile::Span SpillFile::span(std::int32_t extent, std::int64_t piece) const {
  const std::lock_guard lock(mutex_);
  Extent& found = *extents_.at(static_cast<std::size_t>(extent));
  const Bytes begin = piece * found.piece_bytes;
  return {.piece = &found.pieces.at(static_cast<std::size_t>(piece)),
          .begin = begin,
          .offset = found.offset + begin,
          .bytes = std::min(found.piece_bytes, found.bytes - begin)};
}

void SpillFile::transfer(const Span& span, const char* doing, const std::function<ssize_t(Bytes, Bytes)>& move) const {
  int interruptions = 0;
  for (Bytes done = 0; done < span.bytes;) {
    const ssize_t result = move(done, span.bytes - done);
    if (is_interrupted(result) && ++interruptions < kMostInterruptions) {
      continue;
    }
    HYDRA_EXPECT(result > 0 && interruptions < kMostInterruptions, SpillError,
                 std::string(doing) + " " + human_bytes(span.bytes) + " in spill_dir '" + folder_ +
                     "' failed: " + reason(result >= 0 ? EIO : static_cast<int>(-result)) + room_in(folder_));
    done += progress(result, interruptions);
  }
}

void SpillFile::write_piece(std::int32_t extent, std::int64_t piece, const void* data) {
  home_.expect_here();
  const Span to = span(extent, piece);
  const auto* const from = static_cast<const std::byte*>(data) + to.begin;
  to.piece->state = PieceState::kLost;
  to.piece->checksum = crc32c(from, to.bytes);
  transfer(to, "writing",
           [&](Bytes done, Bytes left) { return files_.write(descriptor_, from + done, left, to.offset + done); });
  to.piece->state = PieceState::kWritten;
}

void SpillFile::read_piece(std::int32_t extent, std::int64_t piece, void* data) {
  home_.expect_here();
  const Span from = span(extent, piece);
  HYDRA_EXPECT(from.piece->state != PieceState::kNeverWritten, StateError,
               "piece " + std::to_string(piece) + " of extent " + std::to_string(extent) + " was never written");
  HYDRA_EXPECT(from.piece->state == PieceState::kWritten, SpillError,
               human_bytes(from.bytes) + " in spill_dir '" + folder_ +
                   "' are lost: writing them failed before. Load the last checkpoint");
  auto* const to = static_cast<std::byte*>(data) + from.begin;
  transfer(from, "reading",
           [&](Bytes done, Bytes left) { return files_.read(descriptor_, to + done, left, from.offset + done); });
  HYDRA_EXPECT(crc32c(to, from.bytes) == from.piece->checksum, SpillError,
               human_bytes(from.bytes) + " in spill_dir '" + folder_ +
                   "' are not what was written there: the disk is damaged. Load the last checkpoint, and use another "
                   "folder");
}

}  // namespace hydra
