#include "csrc/transfer/disk_lane.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <functional>
#include <mutex>

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

constexpr Bytes kBytes = 2 * SpillFile::kPieceBytes + 5 * kDiskAlignment;  // three pieces

DiskJob job(DiskDirection direction, std::int32_t extent, const Buffer& buffer) {
  return {.direction = direction, .extent = extent, .data = buffer.data(), .owner = nullptr};
}

/// Files whose writes wait for the test, and which record the order in which transfers began.
class GatedFiles final : public FileOperations {
 public:
  int open_unnamed(const char* folder) override { return system_files().open_unnamed(folder); }
  int bypass_cache(int, bool) override { return -EINVAL; }
  int allocate(int descriptor, Bytes offset, Bytes bytes) override {
    return system_files().allocate(descriptor, offset, bytes);
  }
  ssize_t read(int descriptor, void* data, Bytes bytes, Bytes offset) override {
    note('r');
    if (holds_reads_back) {
      const std::size_t number = reads_++;
      if (number < first_reads.size()) {
        first_reads.at(number).begun.open();
        first_reads.at(number).gate.wait();
      }
    }
    return system_files().read(descriptor, data, bytes, offset);
  }
  ssize_t write(int descriptor, const void* data, Bytes bytes, Bytes offset) override {
    note('w');
    if (holds_back) {
      begun.open();
      gate.wait();
    }
    return system_files().write(descriptor, data, bytes, offset);
  }
  void close(int descriptor) noexcept override { system_files().close(descriptor); }

  std::atomic<bool> holds_back{false};
  test::Gate begun;
  test::Gate gate;
  std::atomic<bool> holds_reads_back{false};
  struct Read {
    test::Gate begun;
    test::Gate gate;
  };
  std::array<Read, 2> first_reads;
  std::string order;  // the order in which transfers began

 private:
  void note(char transfer) {
    const std::lock_guard lock(mutex_);
    order += transfer;
  }

  std::mutex mutex_;
  std::atomic<std::size_t> reads_{0};
};

TEST(DiskLane, DrainLetsAnotherRunGoOn) {
  const Folder folder;
  GatedFiles files;
  SpillFile file(folder.path(), files);
  const Buffer bytes(kDiskAlignment, 1);
  const std::int32_t extent = file.reserve(kDiskAlignment);
  DiskLane lane(file, /*threads=*/1);
  files.holds_back = true;
  lane.submit(job(DiskDirection::kWrite, extent, bytes));
  test::expect_pause([&] { lane.drain(); }, [&] { files.gate.open(); });
}

TEST(DiskLane, MovesWholeExtentsBothWays) {
  const Folder folder;
  SpillFile file(folder.path());
  std::vector<std::int32_t> extents;
  std::vector<Buffer> written;
  std::vector<Buffer> found;
  for (std::uint32_t i = 0; i < 6; ++i) {
    extents.push_back(file.reserve(kBytes));
    written.emplace_back(kBytes, i);
    found.emplace_back(kBytes);
  }
  DiskLane lane(file);
  std::vector<TicketPtr> tickets;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    tickets.push_back(lane.submit(job(DiskDirection::kWrite, extents[i], written[i])));
  }
  for (const TicketPtr& ticket : tickets) {
    ticket->wait();
    EXPECT_EQ(ticket->bytes(), kBytes);
    EXPECT_GT(ticket->seconds(), 0.0);
  }
  for (std::size_t i = 0; i < extents.size(); ++i) {
    lane.submit(job(DiskDirection::kRead, extents[i], found[i]));
  }
  lane.drain();
  for (std::size_t i = 0; i < extents.size(); ++i) {
    EXPECT_TRUE(found[i] == written[i]);
  }
  for (const DiskDirection direction : {DiskDirection::kRead, DiskDirection::kWrite}) {
    const LaneStatistics statistics = lane.statistics(direction);
    EXPECT_EQ(statistics.bytes, 6 * kBytes);
    EXPECT_EQ(statistics.jobs, 6);
    EXPECT_EQ(statistics.failures, 0);
  }
}

TEST(DiskLane, ReadsComeBeforeWrites) {
  const Folder folder;
  GatedFiles files;
  SpillFile file(folder.path(), files);
  const std::int32_t there = file.reserve(kDiskAlignment);
  const std::int32_t one = file.reserve(kBytes);
  const std::int32_t other = file.reserve(kBytes);
  const Buffer bytes(kBytes, 1);
  const Buffer found(kDiskAlignment);
  DiskLane lane(file, /*threads=*/1);
  lane.submit(job(DiskDirection::kWrite, there, bytes))->wait();
  files.order.clear();
  files.holds_back = true;
  lane.submit(job(DiskDirection::kWrite, one, bytes));
  files.begun.wait();
  lane.submit(job(DiskDirection::kWrite, other, bytes));
  lane.submit(job(DiskDirection::kRead, there, found));
  files.gate.open();
  lane.drain();
  EXPECT_EQ(files.order, "wrwwwww");
}

TEST(DiskLane, JobsOfOneExtentKeepTheirOrder) {
  const Folder folder;
  GatedFiles files;
  SpillFile file(folder.path(), files);
  const std::int32_t there = file.reserve(kDiskAlignment);
  const std::int32_t one = file.reserve(kDiskAlignment);
  const Buffer old(kDiskAlignment, 1);
  const Buffer fresh(kDiskAlignment, 2);
  const Buffer found(kDiskAlignment);
  const Buffer elsewhere(kDiskAlignment);
  DiskLane lane(file, /*threads=*/2);
  lane.submit(job(DiskDirection::kWrite, there, old))->wait();
  lane.submit(job(DiskDirection::kWrite, one, old))->wait();
  files.holds_back = true;
  lane.submit(job(DiskDirection::kWrite, one, fresh));
  files.begun.wait();
  const TicketPtr behind = lane.submit(job(DiskDirection::kRead, one, found));
  lane.submit(job(DiskDirection::kRead, there, elsewhere))->wait();  // which nothing holds back
  EXPECT_FALSE(behind->finished());
  files.gate.open();
  behind->wait();
  EXPECT_TRUE(found == fresh);
  EXPECT_TRUE(elsewhere == old);
}

TEST(DiskLane, AWriteThatAReadWaitsForComesInItsPlace) {
  const Folder folder;
  GatedFiles files;
  SpillFile file(folder.path(), files);
  std::vector<std::int32_t> extents;
  for (int i = 0; i < 3; ++i) {
    extents.push_back(file.reserve(kDiskAlignment));
  }
  const Buffer bytes(kDiskAlignment, 1);
  const Buffer found(kDiskAlignment);
  DiskLane lane(file, /*threads=*/1);
  files.holds_back = true;
  lane.submit(job(DiskDirection::kWrite, extents[0], bytes));
  files.begun.wait();
  lane.submit(job(DiskDirection::kWrite, extents[1], bytes));
  lane.submit(job(DiskDirection::kWrite, extents[2], bytes));
  lane.submit(job(DiskDirection::kRead, extents[2], found));
  files.gate.open();
  lane.drain();
  EXPECT_EQ(files.order, "wwrw");
  EXPECT_TRUE(found == bytes);
}

TEST(DiskLane, OneOfSeveralThreadsIsTheWritesWhileSomeWait) {
  const Folder folder;
  GatedFiles files;
  SpillFile file(folder.path(), files);
  std::vector<std::int32_t> extents;
  for (int i = 0; i < 4; ++i) {
    extents.push_back(file.reserve(kDiskAlignment));
  }
  const Buffer bytes(kDiskAlignment, 1);
  const std::array<Buffer, 3> found{Buffer(kDiskAlignment), Buffer(kDiskAlignment), Buffer(kDiskAlignment)};
  DiskLane lane(file, /*threads=*/2);
  for (std::size_t i = 0; i < found.size(); ++i) {
    lane.submit(job(DiskDirection::kWrite, extents[i], bytes))->wait();
  }
  files.order.clear();
  files.holds_reads_back = true;
  const auto read = [&](std::size_t i) { return lane.submit(job(DiskDirection::kRead, extents[i], found.at(i))); };
  read(0);
  read(1);
  for (GatedFiles::Read& first : files.first_reads) {
    first.begun.wait();
  }
  const TicketPtr last_read = read(2);
  const TicketPtr write = lane.submit(job(DiskDirection::kWrite, extents[3], bytes));
  files.first_reads[0].gate.open();  // one thread continues; the other is still in its read
  write->wait();
  last_read->wait();
  files.first_reads[1].gate.open();
  lane.drain();
  EXPECT_EQ(files.order, "rrwr");
}

TEST(DiskLane, AnErrorTravelsInItsTicketAndTheLaneGoesOn) {
  const Folder folder;
  for (std::int64_t nth = 1; nth <= 3; ++nth) {
    FaultyFiles files;
    SpillFile file(folder.path(), files);
    files.reset();
    const std::int32_t extent = file.reserve(kBytes);
    const std::int32_t other = file.reserve(kBytes);
    const Buffer bytes(kBytes, 7);
    const Buffer found(kBytes);
    files.fail(FileOperation::kWrite, FileFault::kError, nth, /*persistent=*/false, EIO);
    DiskLane lane(file, /*threads=*/1);
    const TicketPtr failed = lane.submit(job(DiskDirection::kWrite, extent, bytes));
    const TicketPtr whole = lane.submit(job(DiskDirection::kWrite, other, bytes));
    EXPECT_THROW(failed->wait(), SpillError);
    whole->wait();
    EXPECT_EQ(files.count(FileOperation::kWrite), nth + 3);  // the pieces after a failed one are left out
    EXPECT_EQ(lane.statistics(DiskDirection::kWrite).failures, 1);
    EXPECT_EQ(lane.statistics(DiskDirection::kWrite).bytes, (nth - 1) * file.piece_bytes(extent, 0) + kBytes);
    lane.submit(job(DiskDirection::kWrite, extent, bytes))->wait();
    lane.submit(job(DiskDirection::kRead, extent, found))->wait();
    EXPECT_TRUE(found == bytes);
  }
}

TEST(DiskLane, OwnsItsMemoryUntilTheTicketEnds) {
  const Folder folder;
  SpillFile file(folder.path());
  const std::int32_t extent = file.reserve(kBytes);
  DiskLane lane(file);
  auto memory = std::make_shared<Buffer>(kBytes, 3);
  const std::weak_ptr<Buffer> watch = memory;
  DiskJob writing = job(DiskDirection::kWrite, extent, *memory);
  writing.owner = std::move(memory);
  lane.submit(std::move(writing))->wait();
  EXPECT_TRUE(watch.expired());
}

TEST(DiskLane, RefusesMemoryThatTransfersCannotUse) {
  const Folder folder;
  SpillFile file(folder.path());
  const std::int32_t extent = file.reserve(kBytes);
  DiskLane lane(file);
  const Buffer buffer(kBytes + kDiskAlignment);
  DiskJob wrong = job(DiskDirection::kWrite, extent, buffer);
  wrong.data = static_cast<std::byte*>(buffer.data()) + 512;
  EXPECT_THROW(lane.submit(wrong), StateError);
  wrong.data = nullptr;
  EXPECT_THROW(lane.submit(wrong), StateError);
}

TEST(DiskLane, ItsEndWaitsForWhatIsUnderWay) {
  const Folder folder;
  SpillFile file(folder.path());
  const std::int32_t extent = file.reserve(kBytes);
  const Buffer bytes(kBytes, 9);
  const Buffer found(kBytes);
  TicketPtr ticket;
  {
    DiskLane lane(file);
    ticket = lane.submit(job(DiskDirection::kWrite, extent, bytes));
  }
  EXPECT_TRUE(ticket->finished());
  DiskLane lane(file);
  lane.submit(job(DiskDirection::kRead, extent, found))->wait();
  EXPECT_TRUE(found == bytes);
}

TEST(DiskLane, AForkedChildIsRefusedAndEnds) {
  const Folder folder;
  SpillFile file(folder.path());
  const std::int32_t extent = file.reserve(kBytes);
  const Buffer bytes(kBytes, 9);
  auto lane = std::make_unique<DiskLane>(file);
  lane->submit(job(DiskDirection::kWrite, extent, bytes))->wait();
  const pid_t child = ::fork();
  if (child == 0) {
    int refused = 0;
    try {
      lane->submit(job(DiskDirection::kWrite, extent, bytes));
    } catch (const StateError&) {
      refused = 1;
    }
    lane->drain();
    lane.reset();
    ::_exit(refused);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
}  // namespace hydra
