// The storages that an optimizer step under way reads and writes: each is withheld until the last of the blocks that
// use it is updated.
//
// Blocks may share a storage: their parameters are views of one vector, say, or their gradients of one buffer. Then the
// storage is away as a whole, for all of them. One of no bytes is left where it is.
// Others may look into a storage by tensors that the step does not know, and no operation on those would wait: see
// known_elsewhere().
//
// Owns references to the tensors and storages; parameters have to outlive it. Threads: one at a time.
#pragma once

#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "csrc/pytorch/host_parameter.h"
#include "csrc/pytorch/withheld.h"

namespace hydra {

class UpdateHold {
 public:
  using ReferenceCounts = std::unordered_map<const c10::StorageImpl*, std::size_t>;

  /// Takes away what the update of these blocks reads and writes. `parameters`: those that it writes.
  void take(const std::vector<std::int32_t>& blocks, const std::vector<HostParameter*>& parameters,
            const std::vector<at::Tensor>& tensors, const std::weak_ptr<PagedModel>& owner);
  /// The blocks that use the storage; none if it is not held.
  std::set<std::int32_t> users(const c10::Storage& storage) const;
  /// The blocks that use storages which more refer to than the step's tensors, and as many as `kept` says.
  std::set<std::int32_t> known_elsewhere(const ReferenceCounts& kept) const;
  /// Those that have not ended.
  const std::set<std::int32_t>& blocks() const noexcept { return blocks_; }
  /// The block is updated: what no other block is to be updated with is given back.
  void end(std::int32_t block) noexcept;

 private:
  struct Held {
    c10::Storage storage;
    std::vector<at::Tensor> tensors;
    std::vector<HostParameter*> parameters;
    std::set<std::int32_t> users;
    std::set<std::int32_t> waits_for;
  };

  std::set<std::int32_t> blocks_;
  std::unordered_map<const c10::StorageImpl*, Held> storages_;
  std::map<std::int32_t, std::set<const c10::StorageImpl*>> used_;  // by block
};

}  // namespace hydra
