#include "csrc/io/row_file.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cerrno>
#include <filesystem>
#include <numeric>
#include <random>

#include "csrc/base/errors.h"
#include "csrc/testing/file_faults.h"
#include "tests/cpp/transfer/disk_support.h"

namespace hydra {
namespace {

using test::Folder;
using testing::FaultyFiles;
using testing::FileFault;
using testing::FileOperation;

constexpr std::int64_t kRows = 4000;
constexpr Bytes kRowBytes = 600;  // a MiB and more in all, and no power of two

using Numbers = std::vector<std::int64_t>;
using Contents = std::vector<std::uint8_t>;

Contents read(RowFile& file, const Numbers& rows) {
  Contents found(rows.size() * kRowBytes);
  file.read(rows, reinterpret_cast<std::byte*>(found.data()));
  return found;
}

void write(RowFile& file, const Numbers& rows, const Contents& values) {
  file.write(rows, reinterpret_cast<const std::byte*>(values.data()));
}

Contents contents(std::size_t rows, std::uint32_t seed) {
  return test::random_bytes(static_cast<Bytes>(rows) * kRowBytes, seed);
}

Numbers all() {
  Numbers rows(kRows);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

TEST(RowFile, IsZerosAtFirstAndLeavesNothingInTheFolder) {
  const Folder folder;
  RowFile file(folder.path(), kRows, kRowBytes);
  EXPECT_EQ(read(file, all()), Contents(kRows * kRowBytes));
  EXPECT_TRUE(folder.empty());
  EXPECT_EQ(file.bytes_read(), kRows * kRowBytes);
  EXPECT_EQ(file.bytes_written(), 0);
}

TEST(RowFile, GivesBackWhatEachRowWasGivenLastInAnyOrder) {
  const Folder folder;
  RowFile file(folder.path(), kRows, kRowBytes);
  Contents expected(kRows * kRowBytes);
  std::mt19937 random(0);
  for (std::uint32_t round = 0; round < 30; ++round) {
    Numbers rows = all();
    std::shuffle(rows.begin(), rows.end(), random);
    rows.resize(round % 3 == 0 ? 1 + random() % 50 : 500 + random() % 3000);
    if (round % 2 == 0) {
      std::sort(rows.begin(), rows.end());
    }
    const Contents values = contents(rows.size(), round);
    write(file, rows, values);
    for (std::size_t index = 0; index < rows.size(); ++index) {
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(index * kRowBytes), kRowBytes,
                  expected.begin() + rows[index] * kRowBytes);
    }
    EXPECT_EQ(read(file, rows), values);
  }
  EXPECT_EQ(read(file, all()), expected);
}

TEST(RowFile, KnowsRowsThatWereNeverWritten) {
  const Folder folder;
  FaultyFiles files;
  RowFile file(folder.path(), kRows, kRowBytes, files);
  write(file, {3, 4}, Contents(2 * kRowBytes));
  files.fail(FileOperation::kWrite, FileFault::kError, 1, false, EIO);
  EXPECT_THROW(write(file, {8}, contents(1, 1)), SpillError);
  for (const std::int64_t row : {2, 5, 7, 9}) {
    EXPECT_TRUE(file.is_blank(row));
  }
  for (const std::int64_t row : {3, 4, 8}) {
    EXPECT_FALSE(file.is_blank(row));
  }
}

TEST(RowFile, MovesRowsThatFollowEachOtherTogether) {
  const Folder folder;
  FaultyFiles files;
  RowFile file(folder.path(), kRows, kRowBytes, files);
  files.reset();
  write(file, all(), contents(kRows, 1));
  EXPECT_EQ(files.count(FileOperation::kWrite), 1 + kRows * kRowBytes / RowFile::kTransferBytes);
  read(file, {5, 6, 7, 9, 8});
  EXPECT_EQ(files.count(FileOperation::kRead), 3);
  const Numbers later = {50, 51, 60};
  file.read_ahead(later);
  EXPECT_EQ(files.hints(), 2);
  EXPECT_EQ(files.count(FileOperation::kRead), 3);
}

TEST(RowFile, NoticesADamagedRowAndAWriteThatNeverArrived) {
  const Folder folder;
  FaultyFiles files;
  RowFile file(folder.path(), kRows, kRowBytes, files);
  write(file, {1, 2, 3}, contents(3, 1));
  files.fail(FileOperation::kRead, FileFault::kFlipped, 1);
  EXPECT_THROW(read(file, {1, 2, 3}), SpillError);
  EXPECT_EQ(read(file, {1, 2, 3}), contents(3, 1));
  files.fail(FileOperation::kWrite, FileFault::kDropped, 1);
  write(file, {2}, contents(1, 2));
  EXPECT_THROW(read(file, {2}), SpillError);
  EXPECT_NO_THROW(read(file, {1}));
  EXPECT_EQ(files.met(), 2);
}

TEST(RowFile, HasLostTheRowsOfAFailedWriteUntilTheyAreWrittenAgain) {
  const Folder folder;
  FaultyFiles files;
  RowFile file(folder.path(), kRows, kRowBytes, files);
  write(file, {1, 2, 3}, contents(3, 1));
  files.fail(FileOperation::kWrite, FileFault::kError, 1, false, EIO);
  EXPECT_THROW(write(file, {2, 3}, contents(2, 2)), SpillError);
  EXPECT_THROW(read(file, {2}), SpillError);
  EXPECT_THROW(read(file, {3}), SpillError);
  EXPECT_THROW(read(file, {1, 2}), SpillError);
  EXPECT_NO_THROW(read(file, {1}));
  write(file, {2, 3}, contents(2, 2));
  EXPECT_EQ(read(file, {2, 3}), contents(2, 2));
}

TEST(RowFile, LosesAllRowsOfAWriteThatFailsInTheMiddle) {
  const Folder folder;
  FaultyFiles files;
  RowFile file(folder.path(), kRows, kRowBytes, files);
  files.fail(FileOperation::kWrite, FileFault::kError, 2, false, ENOSPC);
  EXPECT_THROW(write(file, {1, 5, 9}, contents(3, 1)), SpillError);
  for (const std::int64_t row : {1, 5, 9}) {
    EXPECT_THROW(read(file, {row}), SpillError);
  }
}

TEST(RowFile, LosesRowsOfAllFilesThatBelongTogether) {
  const Folder folder;
  FaultyFiles files;
  RowFile one(folder.path(), kRows, kRowBytes, files);
  RowFile other(folder.path(), kRows, kRowBytes, files);
  RowFile* const both[] = {&one, &other};
  const Numbers rows = {7, 9};
  const Contents values = contents(2, 1);
  const auto* const from = reinterpret_cast<const std::byte*>(values.data());
  const std::byte* const sources[] = {from, from};
  RowFile::write(both, rows, sources);
  EXPECT_EQ(read(one, rows), values);
  EXPECT_EQ(read(other, rows), values);
  files.fail(FileOperation::kWrite, FileFault::kError, 3, false, EIO);  // the first row of the other file
  EXPECT_THROW(RowFile::write(both, rows, sources), SpillError);
  for (RowFile* file : both) {
    for (const std::int64_t row : rows) {
      EXPECT_THROW(read(*file, {row}), SpillError);
    }
  }
}

TEST(RowFile, GoesOnAfterAShortTransfer) {
  const Folder folder;
  FaultyFiles files;
  RowFile file(folder.path(), kRows, kRowBytes, files);
  files.fail(FileOperation::kWrite, FileFault::kShort, 1);
  files.fail(FileOperation::kRead, FileFault::kShort, 1);
  write(file, {10, 11, 12}, contents(3, 1));
  EXPECT_EQ(read(file, {10, 11, 12}), contents(3, 1));
  EXPECT_EQ(files.met(), 2);
}

TEST(RowFile, SaysWhyThereIsNoFile) {
  const Folder folder;
  FaultyFiles files;
  files.fail(FileOperation::kAllocate, FileFault::kError, 1, false, ENOSPC);
  EXPECT_THROW(RowFile(folder.path(), kRows, kRowBytes, files), SpillError);
  EXPECT_THROW(RowFile(folder.path() + "/none", kRows, kRowBytes), SpillError);
  EXPECT_THROW(RowFile(folder.path(), 0, kRowBytes), StateError);
  EXPECT_TRUE(folder.empty());
}

TEST(RowFile, HasNoOtherRows) {
  const Folder folder;
  RowFile file(folder.path(), kRows, kRowBytes);
  EXPECT_THROW(read(file, {kRows}), StateError);
  EXPECT_THROW(read(file, {-1}), StateError);
  EXPECT_THROW(write(file, {kRows - 1, kRows}, contents(2, 1)), StateError);
  EXPECT_EQ(read(file, {kRows - 1}), Contents(kRowBytes));
}

TEST(RowFile, IsNotForAForkedChild) {
  const Folder folder;
  RowFile file(folder.path(), kRows, kRowBytes);
  const pid_t child = ::fork();
  if (child == 0) {
    int seen = 0;
    try {
      write(file, {1}, contents(1, 1));
    } catch (const StateError&) {
      ++seen;
    }
    ::_exit(seen == 1 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read(file, {1}), Contents(kRowBytes));
}

}  // namespace
}  // namespace hydra
