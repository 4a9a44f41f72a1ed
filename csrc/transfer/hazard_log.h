// Which device bytes compute has read or written and whose end was not seen, and the copies that
// touched them all the same.
//
// Positions are those of the compute lane. Ranges are compared as numbers and never accessed, so they may be
// long released. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/base/types.h"

namespace hydra {

class HazardLog {
 public:
  using Position = std::int64_t;

  void compute_reads(const void* pointer, Bytes bytes, Position position);
  void compute_writes(const void* pointer, Bytes bytes, Position position);

  /// A lane is about to write, or read, these bytes with everything up to `seen` known to have ended.
  void copy_overwrites(const void* pointer, Bytes bytes, Position seen);
  void copy_reads(const void* pointer, Bytes bytes, Position seen);

  std::int64_t count() const;
  std::string first() const;

 private:
  /// First and past-the-end address. Compute touches the same pages again and again, so entries are few.
  using Range = std::pair<std::uintptr_t, std::uintptr_t>;
  struct Access {
    Position last_read = 0;
    Position last_write = 0;
  };

  static Range range(const void* pointer, Bytes bytes) noexcept;
  void check(Range copied, Position seen, bool overwrites);

  mutable std::mutex mutex_;
  std::map<Range, Access> accesses_;
  std::int64_t count_ = 0;
  std::string first_;
};

}  // namespace hydra
