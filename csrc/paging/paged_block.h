// A block in the pager: its place, the truth of its bytes, its expected uses, and its pins.
//
// These parts change independently; questions about several of them are answered here. The number, the name and the
// size never change, and may be read without a lock. Otherwise not thread-safe: the pager's mutex guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "csrc/paging/block_place.h"
#include "csrc/paging/slot_truth.h"

namespace hydra {

/// Why a block was acquired: by a hook that foresaw the use, or by an operation on a device parameter.
enum class AcquireReason : std::uint8_t { kHook, kFault };

/// The expected uses of a block.
struct Outlook {
  static constexpr std::int64_t kNever = std::int64_t{1} << 62;

  std::int64_t next_use = kNever;  // index in the expected uses; kNever if none is expected
  bool wanted = false;             // the plan keeps the block in a slot, or brings it into one
  std::int64_t last_arrival = 0;   // the number of the arrival, counted over all blocks
};

struct PagedBlock {
  PagedBlock(std::int32_t number, std::string its_name, Bytes bytes, std::unique_ptr<BlockClient> client)
      : index(number), name(std::move(its_name)), place(bytes, std::move(client)) {}

  /// Whether its bytes are in its slot, or on their way there.
  bool has_fill() const noexcept {
    return place.state() == BlockState::kPresent || place.state() == BlockState::kLoading;
  }
  /// Whether it may be evicted now.
  bool may_go() const noexcept { return pins == 0 && truth.is_on_host() && place.can_give_up_slot(); }
  /// Whether its bytes have to be written back now. A pinned block may be written at this moment: it is written back
  /// after its release.
  bool is_to_go_home() const noexcept {
    return truth.is_dirty() && pins == 0 && !truth.is_settled() && place.state() == BlockState::kPresent;
  }
  /// The order of eviction: blocks that the plan does not want, stale ones, the one that is needed last, the one that
  /// was used longest ago.
  bool goes_before(const PagedBlock& other) const noexcept;

  void unpin() noexcept {
    if (pins > 0) {  // Pager::close() resets the count
      --pins;
    }
  }
  /// Ends one acquisition: records a fence behind the use if it can, and unpins the block.
  void end_use(DeviceBackend& backend, AcquireReason reason) noexcept;

  const std::int32_t index;
  const std::string name;
  BlockPlace place;
  SlotTruth truth;
  Outlook outlook;
  TicketPtr last_fill;  // reads the backing until it ends, even if the block has lost the slot; null before the first
  std::int32_t pins = 0;
};

}  // namespace hydra
