// The stash's books: which parts of which storages it has, in what order they were saved, and where their bytes are.
//
// An interval is part of a storage as it was at one version. It is *held* while the stash itself keeps device memory of
// it alive; memory that others keep alive is remembered weakly, and serves as well. Everything of an interval but its
// first group is the books' mutex's; what is let go under it is handed out, to be destroyed without it.
// Transfers know the books and not the stash: whoever ends last may be a lane, which must not end its own device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/pytorch/arena_region.h"
#include "csrc/transfer/ticket.h"

namespace hydra {

class StashBooks;

struct StashStatistics {
  std::int64_t tensors = 0;    // saved
  std::int64_t kept = 0;       // of them handed back as they were
  std::int64_t intervals = 0;  // that the others share
  Bytes saved_bytes = 0;       // of intervals
  Bytes to_host_bytes = 0;     // counted where they are copied
  Bytes to_device_bytes = 0;
  std::int64_t prefetched = 0;         // intervals that came back ahead of their use
  std::int64_t stayed = 0;             // that could not leave: no host memory, or a failed transfer
  double wait_seconds = 0.0;           // for room, while saving
  double backward_wait_seconds = 0.0;  // for bytes to come back
  Bytes held_bytes = 0;                // on the device now
  Bytes peak_held_bytes = 0;
  Bytes host_bytes = 0;  // lent by the host now
};

/// What a tensor's versions are counted by, which only serves to be compared.
struct VersionMark {
  const void* counter = nullptr;
  std::uint32_t version = 0;
  bool operator==(const VersionMark&) const = default;
};

struct StashedInterval {
  StashedInterval(std::shared_ptr<StashBooks> owner, std::int64_t which, Bytes size, Bytes after, VersionMark mark,
                  bool at_once)
      : books(std::move(owner)), number(which), bytes(size), lead(after), saved_at(mark), leaves_at_once(at_once) {}
  ~StashedInterval();
  StashedInterval(const StashedInterval&) = delete;
  StashedInterval& operator=(const StashedInterval&) = delete;

  const std::shared_ptr<StashBooks> books;
  const std::int64_t number;
  const Bytes bytes;
  const Bytes lead;  // of its first byte after a multiple of the device's alignment
  const VersionMark saved_at;
  const bool leaves_at_once;  // what comes after it in this pass will need all the room, as far as is known

  c10::Storage held;
  c10::weak_intrusive_ptr<c10::StorageImpl> lent{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::StorageImpl* storage = nullptr;  // held or lent; for comparison
  const void* data = nullptr;           // there
  Bytes begin = 0;                      // there
  std::vector<c10::StorageImpl*> known_by;
  ArenaRegionPtr host;  // once all bytes are there
  TicketPtr leaving;
  TicketPtr arriving;
  bool begun_to_leave = false;
  bool stays = false;
  int waiting = 0;  // tensors that share it and were not asked for yet
};

using StashedIntervalPtr = std::shared_ptr<StashedInterval>;

class StashBooks final : public std::enable_shared_from_this<StashBooks> {
 public:
  using Lock = std::lock_guard<std::mutex>;

  /// Without a budget as little as transfers need is held: twice the largest interval.
  explicit StashBooks(std::optional<Bytes> budget) : budget_(budget) {}

  std::mutex& mutex() const noexcept { return mutex_; }

  // ---- with the mutex held ------------------------------------------------------------------------------------------
  StashStatistics statistics;

  Bytes room() const noexcept { return budget_.value_or(2 * largest_); }
  bool has_room(Bytes bytes) const noexcept { return statistics.held_bytes + bytes <= room(); }
  /// An interval that these bytes of the storage lie in, as they are now; null if there is none.
  StashedIntervalPtr find(const c10::Storage& storage, Bytes begin, Bytes end, VersionMark mark) const;
  /// A new one, of memory that is held from now on.
  StashedIntervalPtr enter(const c10::Storage& storage, Bytes begin, Bytes bytes, Bytes lead, VersionMark mark);
  void hold(const StashedIntervalPtr& interval, c10::Storage storage, Bytes begin);
  c10::Storage let_go(StashedInterval& interval);
  /// Device memory of it that is alive, whoever keeps it so.
  c10::Storage alive(const StashedInterval& interval) const;
  /// The oldest that is held and can be let go, or leave, or is on its way.
  StashedIntervalPtr oldest_held();
  /// The one saved last before `number` that is on the host alone.
  StashedIntervalPtr latest_away(std::int64_t number) const;

  // ---- without it ---------------------------------------------------------------------------------------------------
  /// All bytes of an interval are on the host; null for one that has gone meanwhile. For the lane.
  void left(const StashedIntervalPtr& interval, ArenaRegionPtr host);
  void forget(StashedInterval& interval) noexcept;

 private:
  const std::optional<Bytes> budget_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::weak_ptr<StashedInterval>> saved_;  // in the order of saving
  std::map<std::int64_t, std::weak_ptr<StashedInterval>> held_;   // of them
  std::unordered_map<c10::StorageImpl*, std::vector<std::weak_ptr<StashedInterval>>> known_;
  std::int64_t numbered_ = 0;
  Bytes largest_ = 0;
  // A pass is what is saved from when there was nothing until there is nothing again.
  Bytes pass_bytes_ = 0;
  std::optional<Bytes> last_pass_bytes_;
};

}  // namespace hydra
