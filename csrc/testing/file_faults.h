// Scripted faults of files: the n-th operation of a kind fails, is short, or reports a false result.
//
// All other operations go to `files`, which has to outlive this object. A rule counts operations that begin later.
// Thread-safe. Sizes are bytes.
#pragma once

#include <array>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/io/file_operations.h"

namespace hydra::testing {

enum class FileOperation : std::uint8_t { kOpen, kBypass, kAllocate, kRead, kWrite };

enum class FileFault : std::uint8_t {
  kError,    // the operation fails with the given errno
  kShort,    // it moves half of the bytes, rounded down to a multiple of 512, at least one byte
  kDropped,  // a write reports success without writing
  kFlipped,  // a read flips one bit
};

class FaultyFiles final : public FileOperations {
 public:
  explicit FaultyFiles(FileOperations& files = system_files()) : files_(files) {}

  /// Gives the fault to the n-th operation from now, counted from 1, and with `persistent` to every later one.
  void fail(FileOperation operation, FileFault fault, std::int64_t nth, bool persistent = false, int error = 0);
  /// Forgets rules and counts.
  void reset();
  /// Operations of the kind since construction or reset().
  std::int64_t count(FileOperation operation) const;
  /// Operations since construction or reset() that a rule has met.
  std::int64_t met() const;

  int open_unnamed(const char* folder) override;
  int bypass_cache(int descriptor, bool bypass) override;
  int allocate(int descriptor, Bytes offset, Bytes bytes) override;
  ssize_t read(int descriptor, void* data, Bytes bytes, Bytes offset) override;
  ssize_t write(int descriptor, const void* data, Bytes bytes, Bytes offset) override;
  void close(int descriptor) noexcept override;
  void will_need(int descriptor, Bytes offset, Bytes bytes) noexcept override;
  /// Calls of will_need() since construction or reset().
  std::int64_t hints() const;

 private:
  struct Rule {
    FileOperation operation;
    FileFault fault;
    std::int64_t number;
    bool persistent;
    int error;
  };
  /// Counts one operation, and returns the rule that it meets.
  std::optional<Rule> next(FileOperation operation);

  FileOperations& files_;
  mutable std::mutex mutex_;
  std::vector<Rule> rules_;
  std::array<std::int64_t, 5> counts_{};
  std::int64_t met_ = 0;
  std::int64_t hints_ = 0;
};

}  // namespace hydra::testing
