// The host tier: regions of exact size from mmap, one per block, pinned if a pinner is given.
//
// A region is rounded up to the system's page size only, never to a power of two. Large regions ask for
// huge pages and are pre-touched by several threads, since page faults and pinning dominate start-up.
// Pinned regions are kept out of forked children (MADV_DONTFORK): a child must not touch pinned pages,
// and a fork must not copy them. In a child allocate() throws StateError and every other call does nothing.
// When pinning fails the region stays pageable, the arena remembers it (pageable_bytes) and goes on.
// Thread-safe. Large regions are touched and pinned outside the lock. The pinner has to outlive the arena. Destroying
// an arena with live regions is an error of the caller: they are un-pinned and left mapped, never freed under
// a user's tensor. Releasing what the arena does not hold is ignored.
#pragma once

#include <map>
#include <mutex>

#include "csrc/memory/resource.h"

namespace hydra {

/// Page-locks memory for a device. Both calls may be slow; neither throws.
class Pinner {
 public:
  virtual ~Pinner() = default;
  virtual bool pin(void* pointer, Bytes bytes) noexcept = 0;
  virtual void unpin(void* pointer, Bytes bytes) noexcept = 0;
};

class HostArena final : public Resource {
 public:
  /// `pinner` may be null: then nothing is pinned and nothing counts as a fall-back.
  explicit HostArena(Pinner* pinner = nullptr) noexcept;
  ~HostArena() override;

  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;

  /// Un-pins every region and lets forked children inherit them again; memory stays where it is.
  /// For the end of a context whose parameters go on living in the arena.
  void unpin_all() noexcept;

  Bytes mapped_bytes() const noexcept;  // as rounded to system pages
  Bytes pinned_bytes() const noexcept;
  Bytes pageable_bytes() const noexcept;  // regions a pinner was asked for and refused

 private:
  struct Region {
    Bytes mapped = 0;
    bool pinned = false;
    bool refused = false;
  };

  bool in_forked_child() const noexcept;
  void pin(void* pointer, Bytes mapped) noexcept;
  void unpin(void* pointer, Bytes mapped) noexcept;
  Bytes sum(Bytes (*of)(const Region&)) const noexcept;

  Pinner* pinner_;
  const std::int64_t owner_process_;
  mutable std::mutex mutex_;
  std::map<void*, Region> regions_;
};

}  // namespace hydra
