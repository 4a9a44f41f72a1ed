// The host tier: regions of exact size from mmap, one for each block, pinned if the arena has a pinner.
//
// A region is rounded up to the system's page size only, not to a power of two. Large regions use huge pages, and
// several threads touch them first: page faults and pinning dominate start-up.
// Pinned regions stay out of forked children (MADV_DONTFORK): a child must not touch pinned pages, and a fork must not
// copy them. In a child allocate() throws StateError, and every other call does nothing.
// If pinning fails, the region stays pageable and counts in pageable_bytes().
// Regions lie at the arena's NUMA node, if it has one, as long as that node has memory left.
//
// Owns its regions. The pinner has to outlive the arena. A caller must release all regions before it destroys the
// arena; the destructor un-pins the others and leaves them mapped, so that no memory is freed under a user's tensor.
// release() ignores addresses that are not the arena's. Sizes are bytes.
// Thread-safe. Large regions are touched and pinned outside the lock.
#pragma once

#include <map>
#include <mutex>
#include <optional>

#include "csrc/memory/numa_node.h"
#include "csrc/memory/resource.h"

namespace hydra {

/// Page-locks memory for a device. Both calls may be slow; neither throws. pin() returns false on failure.
class Pinner {
 public:
  virtual ~Pinner() = default;
  virtual bool pin(void* pointer, Bytes bytes) noexcept = 0;
  virtual void unpin(void* pointer, Bytes bytes) noexcept = 0;
};

class HostArena final : public Resource {
 public:
  /// `pinner` may be null: then no region is pinned, and none counts as pageable. `node` is next to the device.
  explicit HostArena(Pinner* pinner = nullptr, std::optional<NumaNode> node = std::nullopt) noexcept;
  ~HostArena() override;

  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;
  /// The bytes that a region of this size maps.
  static Bytes mapped_for(Bytes bytes) noexcept;

  /// Un-pins every region, and lets forked children inherit them again. Memory stays where it is.
  /// Called at the end of a context whose parameters stay in the arena.
  void unpin_all() noexcept;

  Bytes mapped_bytes() const noexcept;  // rounded up to system pages
  Bytes pinned_bytes() const noexcept;
  Bytes pageable_bytes() const noexcept;  // regions that the pinner has refused

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
  const std::optional<NumaNode> node_;
  const std::int64_t owner_process_;
  mutable std::mutex mutex_;
  std::map<void*, Region> regions_;
};

}  // namespace hydra
