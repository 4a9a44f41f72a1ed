// Copies of device memory, off the device: in host memory up to a limit, and beyond it in a spill file.
//
// A copy in the file moves in chunks, through staging memory that counts in the limit. A chunk of its way out holds
// staging until the disk has it, and the copy is complete when all of it is there. On the way back the next chunk is
// read while one is on the lane. The chunks of each direction take staging of their own, and only when their turn on
// the lane has come. So no chunk ever waits for staging that waits for the lane.
// The file is made when the first copy needs it. A store that is closed gives it up, with the last copy in it.
//
// Ownership: copies keep the store and the file alive, and transfers keep their copy alive. No thread of the disk owns
// either.
// Threads: any. Transfers of one copy do not overlap. Sizes are bytes. Errors of the disk are SpillErrors.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "csrc/pytorch/memory/copy_disk.h"
#include "csrc/pytorch/memory/host_buffers.h"
#include "csrc/pytorch/memory/working_memory.h"
#include "csrc/transfer/lane.h"

namespace hydra {

/// A transfer between the device and a copy.
struct CopyTransfer {
  void* device = nullptr;
  Bytes bytes = 0;
  std::shared_ptr<void> owner;  // keeps the device's memory alive
  Priority priority = Priority::kPrefetch;
  FencePtr fence;
  std::function<void()> after;  // runs on the lane when all bytes have arrived
};

class StoredCopy {
 public:
  StoredCopy() = default;
  StoredCopy(const StoredCopy&) = delete;
  StoredCopy& operator=(const StoredCopy&) = delete;
  virtual ~StoredCopy() = default;

  /// Begins to fill the copy. The ticket ends when the copy has all bytes, or with the first error.
  virtual TicketPtr receive(Lane& to_host, CopyTransfer from) = 0;
  /// Begins to read the copy. A transfer that failed may be tried again.
  virtual TicketPtr give(Lane& to_device, CopyTransfer to) = 0;
};
using StoredCopyPtr = std::shared_ptr<StoredCopy>;

struct CopyStatistics {
  Bytes host_bytes = 0;       // of copies that are in host memory now
  Bytes peak_host_bytes = 0;  // mapped at one time: copies, memory that is kept for the next ones, and staging
  Bytes disk_bytes = 0;       // of copies that are in the file now
  Bytes written_bytes = 0;
  Bytes read_bytes = 0;
  double writing_seconds = 0.0;
  double reading_seconds = 0.0;
};

class CopyStore final : public std::enable_shared_from_this<CopyStore> {
 public:
  static constexpr int kDeparting = 2;  // chunks of staging: one is filled, one is written
  static constexpr int kReturning = 2;  // a transfer, and a more urgent one that has overtaken it
  static constexpr int kAhead = 1;
  static constexpr int kStaged = kDeparting + kReturning + kAhead;
  static constexpr Bytes kMostChunkBytes = SpillFile::kPieceBytes;
  static constexpr Bytes kLeastBytes = kStaged * kDiskAlignment;         // with less, nothing goes to the disk
  static constexpr Bytes kWorkingBytes = 2 * kStaged * kMostChunkBytes;  // more makes chunks no larger

  explicit CopyStore(std::shared_ptr<HostArena> arena);
  ~CopyStore();
  CopyStore(const CopyStore&) = delete;
  CopyStore& operator=(const CopyStore&) = delete;

  /// Limits host memory from now on, once, before any copy is made. What it has no room for goes to the folder; if
  /// there is not even room for staging, nothing does. `files`: null for the system's.
  void limit(Bytes bytes, std::string folder, std::shared_ptr<FileOperations> files);
  /// Makes room for a copy. Throws OutOfMemory if there is no room and no disk, and SpillError if the disk has none.
  StoredCopyPtr make(Bytes bytes);
  /// Why copies cannot go to the disk, or why the last one did not, for messages; else empty.
  std::string obstacle() const;
  /// Stops keeping host memory and room on the disk for next copies.
  void close() noexcept;
  CopyStatistics statistics() const;

 private:
  friend class CopyOnDisk;
  struct Limit {
    Bytes bytes = 0;
    std::string folder;
    std::shared_ptr<FileOperations> files;
  };

  std::shared_ptr<CopyDisk> disk();
  void note_write(std::string error);  // empty after a success
  static void count_moved(const CopyDisk& disk, CopyStatistics& statistics);

  const std::shared_ptr<HostBuffers> buffers_;
  const std::shared_ptr<WorkingMemory> departing_;
  const std::shared_ptr<WorkingMemory> returning_;
  const std::shared_ptr<WorkingMemory> ahead_;
  std::optional<Limit> limit_;
  Bytes chunk_bytes_ = 0;  // 0: no disk
  mutable std::mutex mutex_;
  std::shared_ptr<CopyDisk> disk_;
  std::weak_ptr<CopyDisk> given_up_;
  CopyStatistics moved_;  // until it was given up
  std::string failed_write_;
};

}  // namespace hydra
