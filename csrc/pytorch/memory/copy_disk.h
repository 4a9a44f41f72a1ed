// The disk of copies: a spill file, the threads that move bytes there, and the extents that freed copies have left.
//
// The file is gone with this object, whose destructor waits for transfers. Sizes are bytes. Errors of the disk are
// SpillErrors. Threads: any, but none of the lane's may own this object.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "csrc/transfer/disk_lane.h"

namespace hydra {

class CopyDisk final {
 public:
  static constexpr int kThreads = 2;  // one direction at a time has work, of at most two chunks

  /// `files`: null for the system's.
  CopyDisk(const std::string& folder, std::shared_ptr<FileOperations> files);
  CopyDisk(const CopyDisk&) = delete;
  CopyDisk& operator=(const CopyDisk&) = delete;

  /// Returns an extent of at least `bytes`. Throws SpillError if the disk has no room.
  std::int32_t take(Bytes bytes);
  void free(std::int32_t extent) noexcept;
  TicketPtr submit(DiskJob job) { return lane_.submit(std::move(job)); }

  /// Of the extents that are taken.
  Bytes bytes() const;
  LaneStatistics statistics(DiskDirection direction) const { return lane_.statistics(direction); }

 private:
  /// A free extent of that size, if there is one.
  std::optional<std::int32_t> take_free(Bytes least, Bytes most);

  const std::shared_ptr<FileOperations> files_;
  SpillFile file_;
  DiskLane lane_;
  mutable std::mutex mutex_;
  std::multimap<Bytes, std::int32_t> free_extents_;  // by size
  Bytes bytes_ = 0;
};

}  // namespace hydra
