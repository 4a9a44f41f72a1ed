// The host side of a block: the bytes that its pages are filled from, and written back to.
//
// Every parameter has a 512-byte aligned offset, which is the same in the slot and in the arena. So a block whose
// parameters all lie in the arena is one copy. Parameters that could not be moved there are copied one by one.
// If faces have another dtype than hosts, the lane first casts into a staging region, and moves the smaller bytes.
// Staging is valid until a host changes.
//
// A block's weights may move to the disk and back. While they are there, fills read them from the disk (WeightLoans),
// and the hosts have no bytes.
//
// Poison (tests): take_aside() copies the hosts' bytes, and conceal() fills the hosts with 0xff. A forward that reads a
// host parameter by mistake then computes NaN. Fills use the copied bytes. reveal() restores the hosts, and discards
// all writes to them since.
//
// The parameters have to outlive it. Threads: fill() under the pager's lock, its job on the lane; take_aside(),
// conceal() and reveal() while the lanes are idle.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/optim/deferred_update.h"
#include "csrc/paging/block_client.h"
#include "csrc/pytorch/memory/host_arithmetic.h"
#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra {

class WeightLoans;

/// What the backings of a model share.
struct SharedHost {
  std::shared_ptr<HostArena> arena;
  HostArithmetic casting{};  // apart from that of gradients, which must not wait for a block's cast
};

class BlockBacking final : public BlockClient {
 public:
  /// Moves the hosts' bytes into the arena, as far as that is possible. `shared` has to outlive this object.
  BlockBacking(std::vector<HostParameter*> parameters, SharedHost& shared);

  Job fill(void* slot) override;
  Job write_back(void* slot) override;
  void publish(void* slot) noexcept override;
  void withdraw() noexcept override;

  /// Tells that the hosts' bytes have changed since the last fill.
  void host_changed() noexcept { staging_.valid = false; }
  /// Makes fills wait for the block's part of this update; null ends that.
  void wait_before_fill(std::shared_ptr<DeferredUpdate> update);
  /// Whether the hosts' bytes are all on the host, and have no other owner.
  bool can_leave() const;
  /// The arena region of the hosts' bytes, or null if some of them are elsewhere.
  ArenaRegionPtr home() const;
  /// The parameters, and the offset of each one's bytes in the arena region.
  std::vector<std::pair<HostParameter*, Bytes>> places() const;
  /// Tells that the hosts' bytes move to the disk, from where `loans` reads them.
  void goes_to_disk(std::shared_ptr<WeightLoans> loans) noexcept { loans_ = std::move(loans); }
  /// Tells that the hosts' bytes have moved to the disk, and drops the arena region.
  void went_to_disk() noexcept;
  /// Tells that the hosts' bytes are in this region again.
  void came_home(ArenaRegionPtr home) noexcept;
  /// take_aside() for all blocks goes before conceal() for any, since parameters may share memory. Both skip withheld
  /// parameters.
  void take_aside();
  void conceal();
  void reveal() noexcept;

  const std::vector<HostParameter*>& parameters() const noexcept { return parameters_; }
  Bytes slot_bytes() const noexcept { return slot_bytes_; }
  Bytes home_bytes() const noexcept { return home_bytes_; }
  /// The bytes of parameters that are not in the arena.
  Bytes foreign_bytes() const noexcept;

 private:
  /// The bytes cast to the faces' dtype, if it differs from the hosts'.
  struct Staging {
    ArenaRegionPtr region;
    bool valid = false;
  };

  bool casts() const noexcept;
  const std::byte* source_of(const HostParameter& parameter) const;
  std::size_t index_of(const HostParameter& parameter) const;
  void cast_into_staging();
  void cast(const HostParameter& parameter, const std::byte* from, std::byte* to) const;
  std::vector<Segment> from_hosts(std::byte* slot) const;
  Job fill_from_disk(std::byte* slot, const std::shared_ptr<DeferredUpdate>& update);

  std::vector<HostParameter*> parameters_;
  ArenaRegionPtr home_;  // the adopted hosts' bytes
  Staging staging_;
  ArenaRegionPtr aside_;        // the hosts' bytes while the hosts are poisoned: as pinned as they
  std::vector<bool> is_aside_;  // for each parameter
  SharedHost& shared_;
  std::shared_ptr<WeightLoans> loans_;
  std::atomic<bool> on_disk_{false};
  std::mutex update_mutex_;
  std::shared_ptr<DeferredUpdate> update_;
  std::vector<Bytes> home_offsets_;
  Bytes home_bytes_ = 0;
  Bytes slot_bytes_ = 0;
  bool whole_ = true;  // all hosts are in the arena, in the layout of the slot
};

}  // namespace hydra
