// What stands behind a block on the host: the bytes its pages are filled from, and written back to.
//
// Layout: every parameter at its own 512-byte aligned offset, the same in the slot and in the arena, so that
// a block whose parameters all lie in the arena is one copy. Parameters that could not be moved there are
// copied one by one. When faces have another dtype than hosts the lane casts into a staging region first
// and moves the smaller bytes; staging is valid until the host changes.
//
// A block's weights may leave for the disk and come home again: then fills take them from there (WeightLoans), and the
// hosts have no bytes.
//
// Poison (tests): take_aside() copies the hosts' bytes and conceal() fills the hosts with 0xff, so that a forward
// that reads a host parameter by mistake computes NaN; fills come from the bytes aside. reveal() undoes it, and
// with it whatever was written to a host meanwhile.
// Threads: fill() under the pager's lock, its job on the lane; take_aside/conceal/reveal while no lane is at work.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/optim/deferred_update.h"
#include "csrc/paging/block_client.h"
#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra {

class WeightLoans;

class BlockBacking final : public BlockClient {
 public:
  /// Adopts the hosts' bytes into `arena` where that is possible. The parameters have to outlive the backing.
  BlockBacking(std::vector<HostParameter*> parameters, const std::shared_ptr<HostArena>& arena);

  Job fill(void* slot) override;
  Job write_back(void* slot) override;
  void publish(void* slot) noexcept override;
  void withdraw() noexcept override;

  /// The hosts' bytes have changed since the last fill.
  void host_changed() noexcept { staged_ = false; }
  /// Fills wait for the block's part in this update; null: for nothing.
  void wait_before_fill(std::shared_ptr<DeferredUpdate> update);
  /// Whether the hosts' bytes are all here, and have no other owner.
  bool can_leave() const;
  /// Their home, if that is where they are; else null.
  ArenaRegionPtr home() const;
  /// The parameters, and where each one's bytes are in the home.
  std::vector<std::pair<HostParameter*, Bytes>> places() const;
  /// The hosts' bytes have left for the disk, where `loans` gets them; and are in this region again.
  void goes_to_disk(std::shared_ptr<WeightLoans> loans) noexcept { loans_ = std::move(loans); }
  void went_to_disk() noexcept;
  void came_home(ArenaRegionPtr home) noexcept;
  /// In two turns, each for all blocks: parameters may share memory. Those whose bytes are withheld are left alone.
  void take_aside();
  void conceal();
  void reveal() noexcept;

  const std::vector<HostParameter*>& parameters() const noexcept { return parameters_; }
  Bytes slot_bytes() const noexcept { return slot_bytes_; }
  Bytes home_bytes() const noexcept { return home_bytes_; }
  /// Bytes of parameters that stay outside the arena.
  Bytes foreign_bytes() const noexcept;

 private:
  bool casts() const noexcept;
  const std::byte* source_of(const HostParameter& parameter) const;
  std::size_t index_of(const HostParameter& parameter) const;
  void cast_into_staging();
  void cast(const HostParameter& parameter, const std::byte* from, std::byte* to) const;
  std::vector<Segment> from_hosts(std::byte* slot) const;
  Job fill_from_disk(std::byte* slot, const std::shared_ptr<DeferredUpdate>& update);

  std::vector<HostParameter*> parameters_;
  ArenaRegionPtr home_;     // the adopted hosts' bytes
  ArenaRegionPtr staging_;  // face-dtype bytes, when they differ from the hosts'
  std::unique_ptr<std::byte[]> aside_;
  std::vector<bool> is_aside_;  // by parameter
  std::shared_ptr<HostArena> arena_;
  std::shared_ptr<WeightLoans> loans_;
  std::atomic<bool> on_disk_{false};
  std::mutex update_mutex_;
  std::shared_ptr<DeferredUpdate> update_;
  std::vector<Bytes> home_offsets_;
  Bytes home_bytes_ = 0;
  Bytes slot_bytes_ = 0;
  bool whole_ = true;  // all hosts adopted, and the home laid out as the slot is
  bool staged_ = false;
};

}  // namespace hydra
