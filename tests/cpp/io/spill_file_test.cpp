#include "csrc/io/spill_file.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cerrno>
#include <functional>

#include "csrc/base/errors.h"
#include "csrc/testing/file_faults.h"
#include "tests/cpp/transfer/disk_support.h"

namespace hydra {
namespace {

using test::Buffer;
using test::Folder;
using testing::FaultyFiles;
using testing::FileFault;
using testing::FileOperation;

constexpr Bytes kBytes = SpillFile::kPieceBytes + 3 * kDiskAlignment;  // two pieces

void write(SpillFile& file, std::int32_t extent, const Buffer& from) {
  for (std::int64_t piece = 0; piece < file.pieces(extent); ++piece) {
    file.write_piece(extent, piece, from.data());
  }
}

void read(SpillFile& file, std::int32_t extent, const Buffer& to) {
  for (std::int64_t piece = 0; piece < file.pieces(extent); ++piece) {
    file.read_piece(extent, piece, to.data());
  }
}

bool holds(SpillFile& file, std::int32_t extent, const Buffer& wanted) {
  const Buffer found(file.bytes(extent));
  read(file, extent, found);
  return found == wanted;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const SpillError& error) {
    return error.what();
  }
  return {};
}

/// Makes every second transfer short, and end at an offset that is unaligned for transfers that bypass the cache: the
/// last few of the reported bytes were not moved then.
class UnevenFiles final : public FileOperations {
 public:
  int open_unnamed(const char* folder) override { return system_files().open_unnamed(folder); }
  int bypass_cache(int descriptor, bool bypass) override {
    const int result = system_files().bypass_cache(descriptor, bypass);
    bypasses_ = result == 0 ? bypass : bypasses_;
    return result;
  }
  int allocate(int descriptor, Bytes offset, Bytes bytes) override {
    return system_files().allocate(descriptor, offset, bytes);
  }
  ssize_t read(int descriptor, void* data, Bytes bytes, Bytes offset) override {
    return moved(bytes, [&](Bytes some) { return system_files().read(descriptor, data, some, offset); });
  }
  ssize_t write(int descriptor, const void* data, Bytes bytes, Bytes offset) override {
    return moved(bytes, [&](Bytes some) { return system_files().write(descriptor, data, some, offset); });
  }
  void close(int descriptor) noexcept override { system_files().close(descriptor); }

 private:
  ssize_t moved(Bytes bytes, const std::function<ssize_t(Bytes)>& move) {
    const Bytes even = bytes / 2 / kDiskAlignment * kDiskAlignment;
    is_short_ = !is_short_ && even > 0;
    if (!is_short_) {
      return move(bytes);
    }
    const Bytes uneven = even + kDiskAlignment / 4;
    const ssize_t result = move(bypasses_ ? even : uneven);
    return result == even ? uneven : result;
  }

  bool bypasses_ = false;
  bool is_short_ = false;
};

TEST(SpillFile, CutsExtentsIntoPiecesAsEvenAsCanBe) {
  const Folder folder;
  SpillFile file(folder.path());
  constexpr Bytes kMost = SpillFile::kPieceBytes;
  for (const Bytes extra : {-2 * kDiskAlignment, -kDiskAlignment, Bytes{0}, kDiskAlignment, 3 * kDiskAlignment}) {
    for (const Bytes many : {1, 2, 3, 5}) {
      const Bytes bytes = many * kMost + extra;
      const std::int32_t extent = file.reserve(bytes);
      const std::int64_t pieces = file.pieces(extent);
      EXPECT_EQ(pieces, many + (extra > 0 ? 1 : 0));
      Bytes sum = 0;
      for (std::int64_t piece = 0; piece < pieces; ++piece) {
        const Bytes size = file.piece_bytes(extent, piece);
        EXPECT_LE(size, kMost);
        EXPECT_EQ(size % kDiskAlignment, 0);
        EXPECT_GE(size, bytes / pieces - pieces * kDiskAlignment);
        sum += size;
      }
      EXPECT_EQ(sum, bytes);
    }
  }
}

TEST(SpillFile, GivesBackWhatEachExtentWasGivenLast) {
  const Folder folder;
  SpillFile file(folder.path());
  std::vector<std::int32_t> extents;
  for (const Bytes bytes : {Bytes{1}, kDiskAlignment, kBytes, 3 * SpillFile::kPieceBytes}) {
    extents.push_back(file.reserve(bytes));
  }
  for (int round = 0; round < 2; ++round) {
    for (const std::int32_t extent : extents) {
      write(file, extent, Buffer(file.bytes(extent), static_cast<std::uint32_t>(10 * round + extent)));
    }
  }
  for (const std::int32_t extent : extents) {
    EXPECT_TRUE(holds(file, extent, Buffer(file.bytes(extent), static_cast<std::uint32_t>(10 + extent))));
  }
  EXPECT_EQ(file.reserved_bytes(), 2 * kDiskAlignment + kBytes + 3 * SpillFile::kPieceBytes);
  EXPECT_TRUE(folder.empty());
}

TEST(SpillFile, IsThereForItsOwnerAlone) {
  const Folder folder;
  const SpillFile file(folder.path());
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.starts_with(folder.path())) {
      const auto mode = std::filesystem::status(entry.path()).permissions();
      EXPECT_EQ(mode, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
      return;
    }
  }
  FAIL() << "no descriptor of a file in " << folder.path();
}

TEST(SpillFile, WhatWasNeverWrittenCannotBeRead) {
  const Folder folder;
  SpillFile file(folder.path());
  const std::int32_t extent = file.reserve(kBytes);
  const Buffer to(kBytes);
  EXPECT_THROW(file.read_piece(extent, 0, to.data()), StateError);
}

TEST(SpillFile, SaysWhyThereCanBeNone) {
  EXPECT_NE(message_of([] { SpillFile file("/nowhere/at/all"); }).find("/nowhere/at/all"), std::string::npos);
  EXPECT_NE(message_of([] { SpillFile file("/proc/self"); }).find("spill_dir '/proc/self'"), std::string::npos);
}

TEST(SpillFile, AFullDiskIsNoticedWhenRoomIsReserved) {
  const Folder folder;
  FaultyFiles files;
  SpillFile file(folder.path(), files);
  const std::int32_t kept = file.reserve(kBytes);
  const Buffer bytes(kBytes, 1);
  write(file, kept, bytes);
  files.fail(FileOperation::kAllocate, FileFault::kError, 1, /*persistent=*/false, ENOSPC);
  const std::string message = message_of([&] { file.reserve(7 * kMiB); });
  for (const std::string& part :
       {std::string("7.00 MiB"), folder.path(), std::string("No space left"), std::string("free")}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_EQ(file.reserved_bytes(), kBytes);
  EXPECT_TRUE(holds(file, kept, bytes));
  const std::int32_t later = file.reserve(7 * kMiB);  // room was made
  write(file, later, Buffer(7 * kMiB, 2));
  EXPECT_TRUE(holds(file, later, Buffer(7 * kMiB, 2)));
  EXPECT_TRUE(holds(file, kept, bytes));
}

TEST(SpillFile, GoesOnAfterShortAndInterruptedTransfers) {
  const Folder folder;
  for (const FileOperation operation : {FileOperation::kRead, FileOperation::kWrite}) {
    for (const int error : {0, EINTR, EAGAIN}) {
      FaultyFiles files;
      SpillFile file(folder.path(), files);
      files.reset();  // forget the operations that probed the file system
      const std::int32_t extent = file.reserve(kBytes);
      for (const std::int64_t nth : {1, 2, 4}) {
        files.fail(operation, error == 0 ? FileFault::kShort : FileFault::kError, nth, /*persistent=*/false, error);
      }
      const Buffer bytes(kBytes, 5);
      write(file, extent, bytes);
      EXPECT_TRUE(holds(file, extent, bytes));
      EXPECT_EQ(files.count(operation), 5);  // two pieces, and three again
    }
  }
}

TEST(SpillFile, GoesOnWhereATransferCanBegin) {
  const Folder folder;
  UnevenFiles files;
  SpillFile file(folder.path(), files);
  const std::int32_t extent = file.reserve(kBytes);
  const Buffer bytes(kBytes, 7);
  write(file, extent, bytes);
  EXPECT_TRUE(holds(file, extent, bytes));
}

TEST(SpillFile, GivesUpWhereNothingMoves) {
  const Folder folder;
  FaultyFiles files;
  SpillFile file(folder.path(), files);
  const std::int32_t extent = file.reserve(kBytes);
  files.fail(FileOperation::kWrite, FileFault::kError, 1, /*persistent=*/true, EINTR);
  EXPECT_NE(message_of([&] { write(file, extent, Buffer(kBytes, 1)); }).find("Interrupted"), std::string::npos);
}

TEST(SpillFile, EveryFailedOperationIsAnErrorAndCanBeTriedAgain) {
  const Folder folder;
  for (std::int64_t nth = 1; nth <= 2; ++nth) {
    FaultyFiles files;
    SpillFile file(folder.path(), files);
    files.reset();
    const std::int32_t extent = file.reserve(kBytes);
    const Buffer first(kBytes, 1);
    const Buffer second(kBytes, 2);
    write(file, extent, first);
    files.reset();
    files.fail(FileOperation::kRead, FileFault::kError, nth, /*persistent=*/false, EIO);
    EXPECT_THROW(read(file, extent, Buffer(kBytes)), SpillError);
    EXPECT_TRUE(holds(file, extent, first));
    files.fail(FileOperation::kWrite, FileFault::kError, nth, /*persistent=*/false, EIO);
    EXPECT_THROW(write(file, extent, second), SpillError);
    // The file may have old or new bytes, so neither are returned.
    EXPECT_NE(message_of([&] { file.read_piece(extent, nth - 1, Buffer(kBytes).data()); }).find("lost"),
              std::string::npos);
    write(file, extent, second);
    EXPECT_TRUE(holds(file, extent, second));
  }
}

TEST(SpillFile, DamageAndLostWritesAreNoticed) {
  const Folder folder;
  FaultyFiles files;
  SpillFile file(folder.path(), files);
  files.reset();
  const std::int32_t extent = file.reserve(kBytes);
  write(file, extent, Buffer(kBytes, 1));
  files.fail(FileOperation::kRead, FileFault::kFlipped, 2);
  EXPECT_NE(message_of([&] { read(file, extent, Buffer(kBytes)); }).find("not what was written"), std::string::npos);
  EXPECT_TRUE(holds(file, extent, Buffer(kBytes, 1)));
  files.fail(FileOperation::kWrite, FileFault::kDropped, 2);
  write(file, extent, Buffer(kBytes, 2));  // the second piece stays what it was
  EXPECT_NE(message_of([&] { read(file, extent, Buffer(kBytes)); }).find("not what was written"), std::string::npos);
}

TEST(SpillFile, UsesTheCacheWhereItCannotBePassedBy) {
  const Folder folder;
  for (const FileOperation operation : {FileOperation::kBypass, FileOperation::kRead, FileOperation::kWrite}) {
    FaultyFiles files;
    files.fail(operation, FileFault::kError, 1, /*persistent=*/false, EINVAL);
    SpillFile file(folder.path(), files);
    EXPECT_FALSE(file.bypasses_cache());
    const std::int32_t extent = file.reserve(kBytes);
    write(file, extent, Buffer(kBytes, 1));
    EXPECT_TRUE(holds(file, extent, Buffer(kBytes, 1)));
  }
}

TEST(SpillFile, ServesNoForkedChild) {
  const Folder folder;
  SpillFile file(folder.path());
  const std::int32_t extent = file.reserve(kBytes);
  write(file, extent, Buffer(kBytes, 1));
  const pid_t child = ::fork();
  if (child == 0) {
    int refused = 0;
    const Buffer buffer(kBytes);
    for (const auto& call : {std::function<void()>([&] { file.reserve(1); }),
                             std::function<void()>([&] { file.write_piece(extent, 0, buffer.data()); }),
                             std::function<void()>([&] { file.read_piece(extent, 0, buffer.data()); })}) {
      try {
        call();
      } catch (const StateError&) {
        ++refused;
      }
    }
    ::_exit(refused);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 3);
  EXPECT_TRUE(holds(file, extent, Buffer(kBytes, 1)));
}

}  // namespace
}  // namespace hydra
