// A file without a name, in a folder that the user names, for bytes that the host has no room for.
//
// It is gone however the process ends. extend() allocates room on the disk, so a full disk is noticed there. Transfers
// that are interrupted or short go on; what fails throws SpillError.
//
// Owns the file. Sizes and offsets are bytes. Threads: any for transfers, one at a time for the rest. A forked child
// gets StateError.
#pragma once

#include <functional>
#include <string>

#include "csrc/base/process.h"
#include "csrc/io/file_operations.h"

namespace hydra {

/// The alignment of memory, offsets and sizes for transfers that bypass the cache.
inline constexpr Bytes kDiskAlignment = 4096;

class UnnamedFile {
 public:
  /// Throws SpillError if the folder cannot have such a file, or is on a network file system. `files` has to outlive
  /// this object.
  UnnamedFile(std::string folder, FileOperations& files);
  ~UnnamedFile();
  UnnamedFile(const UnnamedFile&) = delete;
  UnnamedFile& operator=(const UnnamedFile&) = delete;

  /// Has transfers bypass the system's cache, if the file system allows it. They need to be aligned from then on.
  void try_bypassing_cache();
  bool bypasses_cache() const noexcept { return bypasses_cache_; }
  /// Reserves room behind the bytes that it has, and returns its offset. Throws SpillError if the disk has none; then
  /// nothing has changed. The new bytes are zeros.
  Bytes extend(Bytes bytes);
  Bytes bytes() const noexcept { return bytes_; }
  void write(const void* data, Bytes bytes, Bytes offset);
  void read(void* data, Bytes bytes, Bytes offset);
  /// Has the system read bytes into its cache soon. Returns at once.
  void read_ahead(Bytes bytes, Bytes offset) const;

  const std::string& folder() const noexcept { return folder_; }
  /// Throws StateError in a forked child.
  void expect_here() const { home_.expect_here(); }

 private:
  /// Calls `move(bytes done, bytes left)` until all bytes have moved.
  void transfer(Bytes bytes, const char* doing, const std::function<ssize_t(Bytes, Bytes)>& move) const;
  Bytes progress(ssize_t result, int& interruptions) const noexcept;

  const HomeProcess home_;
  const std::string folder_;
  FileOperations& files_;
  int descriptor_ = -1;
  bool bypasses_cache_ = false;
  Bytes bytes_ = 0;
};

}  // namespace hydra
