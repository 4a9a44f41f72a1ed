// Withholds the storages that an optimizer step under way reads and writes, each until the last of the blocks that use
// it is updated.
//
// Blocks may share a storage: their parameters may be views of one vector, or their gradients views of one buffer. Such
// a storage is withheld as a whole, for all its blocks. Storages without bytes are left alone.
// A storage may have owners that the step does not know: other tensors, or memory views outside torch. They would read
// it without waiting for the update; known_elsewhere() finds them.
//
// Owns references to the tensors and storages; parameters have to outlive it. Threads: one at a time.
#pragma once

#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "csrc/pytorch/parameters/host_parameter.h"
#include "csrc/pytorch/parameters/withheld.h"

namespace hydra {

class UpdateHold {
 public:
  using ReferenceCounts = std::unordered_map<const c10::StorageImpl*, std::size_t>;
  /// Blocks that are updated together, the parameters that their update writes, and all tensors that it reads or
  /// writes.
  struct Share {
    std::vector<std::int32_t> blocks;
    std::vector<HostParameter*> parameters;
    std::vector<at::Tensor> tensors;
  };
  struct Held {
    c10::Storage storage;
    std::vector<at::Tensor> tensors;
    std::vector<HostParameter*> parameters;
    std::set<std::int32_t> users;
    std::set<std::int32_t> waits_for;
    bool lent = false;
  };
  /// Returned storages. They have to be destroyed without a lock: a tensor's end takes the interpreter lock.
  using Departed = std::vector<Held>;

  /// Withholds the tensors that the step reads and writes.
  void take(const std::vector<Share>& shares, const std::weak_ptr<PagedModel>& owner);
  /// The blocks that use the storage; empty if this object does not withhold it.
  std::set<std::int32_t> users(const c10::Storage& storage) const;
  /// The blocks whose storages have other owners: memory lent to torch, or more references than those of the step's
  /// tensors and those counted in `kept`.
  std::set<std::int32_t> known_elsewhere(const ReferenceCounts& kept) const;
  /// The blocks that are not updated yet.
  const std::set<std::int32_t>& blocks() const noexcept { return blocks_; }
  /// Tells that the block is updated. Returns the storages that no other block still needs, and moves them to
  /// `departed`.
  void end(std::int32_t block, Departed& departed) noexcept;

 private:
  void take_tensors(const Share& share, const std::weak_ptr<PagedModel>& owner);

  std::set<std::int32_t> blocks_;
  std::unordered_map<const c10::StorageImpl*, Held> storages_;
  std::map<std::int32_t, std::set<const c10::StorageImpl*>> used_;  // by block
};

}  // namespace hydra
