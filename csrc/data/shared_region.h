// Memory that a process shares with its workers: results of a data pipeline's stages lie in it.
//
// The region is a memfd. It has no name, so nothing is left behind however the processes end, and it takes nothing from
// /dev/shm. Its pages are allocated when a block is made: a machine without memory for them gives an error then, where
// a sparse file would give a worker a bus error later.
//
// Ownership: blocks belong to the process that made the region. Workers map it by its descriptor, and write where they
// are told. A worker that dies while it writes leaves nothing locked; its block is released and made again. In a forked
// child, which has a copy of the books and the same pages, release() and trim() do nothing.
// Threads: all calls are thread-safe. Units: bytes. Blocks start at multiples of kBlockAlignment.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

#include "csrc/base/types.h"

namespace hydra {

inline constexpr Bytes kBlockAlignment = 64;

class SharedRegion {
 public:
  /// `most`: the largest limit there may ever be. No memory is allocated yet. Throws OutOfMemory if the system has no
  /// descriptors or no addresses for it.
  explicit SharedRegion(Bytes most);
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;
  ~SharedRegion();

  /// Makes a block, and returns where it starts; nothing if there is no room below the limit. Throws StateError unless
  /// `bytes` > 0. Throws OutOfMemory if the system has no memory; then nothing has changed.
  std::optional<Bytes> allocate(Bytes bytes);
  /// Throws StateError if no block starts there.
  void release(Bytes offset);

  /// Blocks beyond a smaller limit stay until they are released. Throws StateError beyond `most`.
  void set_limit(Bytes limit);
  /// Gives the pages behind the last block back to the system.
  void trim() noexcept;

  std::byte* data() const noexcept { return data_; }
  int descriptor() const noexcept { return descriptor_; }
  Bytes most() const noexcept { return most_; }
  Bytes limit() const noexcept;
  Bytes used() const noexcept;       // in blocks
  Bytes allocated() const noexcept;  // pages that the system has given

 private:
  std::optional<Bytes> take(Bytes bytes);
  bool grow(Bytes bytes);
  void give_back(Bytes begin) noexcept;

  const Bytes most_;
  const int owner_;  // the process
  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  mutable std::mutex mutex_;
  Bytes limit_;
  Bytes end_ = 0;  // pages below are allocated
  Bytes used_ = 0;
  std::map<Bytes, Bytes> free_;    // size by start, never two that touch
  std::map<Bytes, Bytes> blocks_;  // size by start
};

}  // namespace hydra
