// A block as the pager sees it: its place, what its bytes are worth, what is known of its future, and its pins.
//
// These parts change by themselves; what is asked of several at once is asked here. Its number, its name and its size
// never change, and may be read without a lock. Not thread-safe otherwise: the pager's mutex guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "csrc/paging/block_place.h"
#include "csrc/paging/slot_truth.h"

namespace hydra {

/// Why a block was acquired: a hook that foresaw the use, or an operation that met it absent.
enum class AcquireReason : std::uint8_t { kHook, kFault };

/// What is known of a block's uses.
struct Outlook {
  static constexpr std::int64_t kNever = std::int64_t{1} << 62;

  std::int64_t next_use = kNever;  // rank in the known future
  bool wanted = false;             // the plan keeps it in, or brings it into, a slot
  std::int64_t last_arrival = 0;
};

struct PagedBlock {
  PagedBlock(std::int32_t number, std::string its_name, Bytes bytes, std::unique_ptr<BlockClient> client)
      : index(number), name(std::move(its_name)), place(bytes, std::move(client)) {}

  /// It may lose its slot now.
  bool may_go() const noexcept { return pins == 0 && truth.is_on_host() && place.can_give_up_slot(); }
  /// Its bytes are to go home. A pinned one may be written at this moment; its turn comes when it is released.
  bool is_to_go_home() const noexcept {
    return truth.is_dirty() && pins == 0 && !truth.is_settled() && place.state() == BlockState::kPresent;
  }
  /// Of two that may go: what the plan does not want goes first, then worthless bytes, then what is needed last, then
  /// what was used longest ago.
  bool goes_before(const PagedBlock& other) const noexcept;

  void unpin() noexcept {
    if (pins > 0) {  // closing forgets them
      --pins;
    }
  }
  /// The use of an acquirer has ended. Unpins it.
  void end_use(DeviceBackend& backend, AcquireReason reason) noexcept;

  const std::int32_t index;
  const std::string name;
  BlockPlace place;
  SlotTruth truth;
  Outlook outlook;
  std::int32_t pins = 0;
};

}  // namespace hydra
