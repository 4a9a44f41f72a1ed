// Finds copies that touch device bytes while kernels may still read or write them: hazards.
//
// The log knows which bytes each kernel reads and writes, and a copy says which kernels it has seen end. Positions are
// those of the compute lane. Ranges are compared as numbers and never accessed, so their memory may be released.
// Thread-safe.
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

  /// Checks a copy that is about to write, or read, these bytes. It has seen all kernels up to `seen` end.
  void copy_overwrites(const void* pointer, Bytes bytes, Position seen);
  void copy_reads(const void* pointer, Bytes bytes, Position seen);

  std::int64_t count() const;
  std::string first() const;

 private:
  /// The first address and the one past the end. Compute touches the same pages repeatedly, so entries are few.
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
