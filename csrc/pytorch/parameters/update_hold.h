// The storages that an optimizer step under way reads and writes: each is withheld until the last of the blocks that
// use it is updated.
//
// Blocks may share a storage: their parameters are views of one vector, say, or their gradients of one buffer. Then the
// storage is away as a whole, for all of them. One of no bytes is left where it is.
// Others may look into a storage by tensors that the step does not know, or into its memory without torch, and nothing
// of that would wait: see known_elsewhere().
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
  /// Blocks that are updated together; the parameters that this writes, and all that it reads or writes.
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
  /// What was given back. It has to end without a lock: torch takes the interpreter lock where a tensor ends.
  using Departed = std::vector<Held>;

  /// Takes away what the step reads and writes.
  void take(const std::vector<Share>& shares, const std::weak_ptr<PagedModel>& owner);
  /// The blocks that use the storage; none if it is not held.
  std::set<std::int32_t> users(const c10::Storage& storage) const;
  /// The blocks that use storages of lent memory, or with more references than those of the step's tensors and those
  /// counted in `kept`.
  std::set<std::int32_t> known_elsewhere(const ReferenceCounts& kept) const;
  /// Those that have not ended.
  const std::set<std::int32_t>& blocks() const noexcept { return blocks_; }
  /// The block is updated: what no other block is to be updated with is given back.
  void end(std::int32_t block, Departed& departed) noexcept;

 private:
  void take_tensors(const Share& share, const std::weak_ptr<PagedModel>& owner);

  std::set<std::int32_t> blocks_;
  std::unordered_map<const c10::StorageImpl*, Held> storages_;
  std::map<std::int32_t, std::set<const c10::StorageImpl*>> used_;  // by block
};

}  // namespace hydra
