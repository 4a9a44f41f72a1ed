// The file operations of a spill file, as an interface, so that tests can script failures.
//
// The methods are the system calls, except that they return an error as -errno. A call that a signal interrupts is not
// repeated here, and transfers may be short: the caller repeats and continues them. Sizes and offsets are bytes.
// The caller owns descriptors, and closes them. Threads: any.
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

  /// Creates an unnamed file in the folder, readable by its owner only, and returns its descriptor. The file disappears
  /// when the last descriptor closes, however the process ends.
  virtual int open_unnamed(const char* folder) = 0;
  /// Lets transfers bypass the system's cache, or not. Bypassing needs aligned memory, offsets and sizes.
  virtual int bypass_cache(int descriptor, bool bypass) = 0;
  /// Reserves room in the file system for bytes [offset, offset + bytes).
  virtual int allocate(int descriptor, Bytes offset, Bytes bytes) = 0;
  virtual ssize_t read(int descriptor, void* data, Bytes bytes, Bytes offset) = 0;
  virtual ssize_t write(int descriptor, const void* data, Bytes bytes, Bytes offset) = 0;
  virtual void close(int descriptor) noexcept = 0;
  /// Has the system read bytes into its cache soon. Nothing depends on it, so that there is nothing to fail.
  virtual void will_need(int, Bytes, Bytes) noexcept {}
};

/// The system calls themselves. The object lives until the process ends.
FileOperations& system_files() noexcept;

}  // namespace hydra
