// What a file is asked to do, and may fail to do: the seam that tests fail.
//
// As the system calls, but an error is returned, as -errno. A call that a signal has interrupted is not repeated here,
// and transfers may be short: the caller goes on. Threads: any.
#pragma once

#include <sys/types.h>

#include "csrc/base/types.h"

namespace hydra {

class FileOperations {
 public:
  FileOperations() = default;
  FileOperations(const FileOperations&) = delete;
  FileOperations& operator=(const FileOperations&) = delete;
  virtual ~FileOperations() = default;

  /// A new file in the folder without a name, for its owner alone: nothing is left of it when its last descriptor
  /// closes, however the process ends.
  virtual int open_unnamed(const char* folder) = 0;
  /// Transfers pass the system's cache by from now on, or not. They need aligned memory, offsets and sizes then.
  virtual int bypass_cache(int descriptor, bool bypass) = 0;
  /// The folder's file system has room for bytes [offset, offset + bytes), and keeps it.
  virtual int allocate(int descriptor, Bytes offset, Bytes bytes) = 0;
  virtual ssize_t read(int descriptor, void* data, Bytes bytes, Bytes offset) = 0;
  virtual ssize_t write(int descriptor, const void* data, Bytes bytes, Bytes offset) = 0;
  virtual void close(int descriptor) noexcept = 0;
};

/// The system's own.
FileOperations& system_files() noexcept;

}  // namespace hydra
